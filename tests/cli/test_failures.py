"""What the command line adds to an error."""

from outrider.cli.failures import with_advice
from speculative.errors import Unauthenticated, Unavailable


def test_an_error_about_a_key_names_the_flag_and_the_variable() -> None:
    assert with_advice(Unauthenticated("no API key came")) == (
        "no API key came (on the command line: --api-key-file, or OUTRIDER_API_KEY)"
    )


def test_other_errors_speak_for_themselves() -> None:
    assert with_advice(Unavailable("no service answers")) == "no service answers"
