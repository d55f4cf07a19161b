"""The flags of `outrider generate`, each with its type and its help."""

from enum import StrEnum
from typing import Annotated

import typer

Float = float | None
Int = int | None


class Switch(StrEnum):
    """Values of a flag that turns a feature on or off."""

    ON = "on"
    OFF = "off"


class Distribution(StrEnum):
    """The distribution that log-probabilities are of."""

    RAW = "raw"
    PROCESSED = "processed"


Address = Annotated[str, typer.Option(help="host:port of the orchestrator, as `outrider up` prints it.")]
Prompt = Annotated[
    str | None, typer.Option(help="Prompt as text; the target's tokenizer adds its special tokens.")
]
Ids = Annotated[
    str | None, typer.Option(help="Prompt as token ids, such as 1,2,3; nothing is added to them.")
]
MaxTokens = Annotated[Int, typer.Option(help="Generate at most this many tokens. Default: 128.")]
Temperature = Annotated[Float, typer.Option(help="Sampling temperature; 0 is greedy. Default: 1.")]
TopK = Annotated[Int, typer.Option(help="Sample from the k likeliest tokens. Default: 0, all.")]
TopP = Annotated[
    Float, typer.Option(help="Sample from the likeliest tokens up to this probability mass. Default: 1.")
]
MinP = Annotated[
    Float, typer.Option(help="Drop tokens less likely than this share of the likeliest. Default: 0.")
]
ContrastStrength = Annotated[
    Float, typer.Option(help="Weight of the verifier's amateur against the target. Default: 0, none.")
]
ContrastPlausibility = Annotated[
    Float,
    typer.Option(help="With a contrast, drop tokens below this share of the likeliest. Default: 0.1."),
]
RepetitionPenalty = Annotated[
    Float, typer.Option(help="Penalize tokens of prompt and output. Default: 1, off.")
]
PresencePenalty = Annotated[
    Float, typer.Option(help="Subtract from the score of every token in the output. Default: 0.")
]
FrequencyPenalty = Annotated[
    Float, typer.Option(help="Subtract from a token's score for each time in the output. Default: 0.")
]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this string; repeatable.")]
StopIds = Annotated[str, typer.Option(help="End the answer at these token ids: 1,2,3.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Continue past end-of-sequence tokens.")]
MinTokens = Annotated[Int, typer.Option(help="Generate at least this many tokens. Default: 0.")]
JsonSchema = Annotated[
    str, typer.Option(help="Answer with JSON of this schema: a file, or the schema itself, {...}.")
]
Regex = Annotated[
    str | None, typer.Option(help="Answer with text that this regular expression matches as a whole.")
]
JsonObject = Annotated[bool, typer.Option("--json-object", help="Answer with a JSON object.")]
Choice = Annotated[
    list[str] | None, typer.Option(help="Answer with this text, or another --choice; repeatable.")
]
Lark = Annotated[
    str, typer.Option(help="Lark grammar that the answer must follow: a file, or the grammar itself.")
]
Answers = Annotated[Int, typer.Option(help="Generate this many answers, 1 to 16. Default: 1.")]
Logprobs = Annotated[
    bool, typer.Option("--logprobs", help="With --json: print each token's log-probability.")
]
TopLogprobs = Annotated[
    Int, typer.Option(help="With --logprobs: also print the k likeliest tokens, up to 20. Default: 0.")
]
LogprobsOf = Annotated[
    Distribution | None,
    typer.Option(
        help="With --logprobs: of the model's softmax, or of the distribution sampled from. Default: raw."
    ),
]
Seed = Annotated[
    Int, typer.Option(help="Seed of the noise, unsigned 64 bits. Default: drawn at random, and printed.")
]
Speculation = Annotated[Switch, typer.Option(help="off: decode without drafts. The tokens are the same.")]
Sources = Annotated[
    str | None,
    typer.Option(help="Use drafts of these sources alone, such as lookup,drafter. Default: all."),
]
Nodes = Annotated[Int, typer.Option(help="Verify at most this many drafted tokens a round; 0: none.")]
Learn = Annotated[Switch, typer.Option(help="off: do not keep the answer to draft from. Default: on.")]
Corpora = Annotated[
    str | None, typer.Option(help="Draft from these corpora alone, such as A,B. Default: all.")
]
References = Annotated[
    list[str] | None,
    typer.Option(help="File that the answer may copy from; repeatable, at most 16."),
]
Edit = Annotated[
    bool, typer.Option("--edit", help="Draft from the prompt's last document, too; the answer edits it.")
]
Criterion = Annotated[
    str | None,
    typer.Option(
        help="Criterion by which drafts are accepted, such as typical:epsilon=0.2; it may "
        "change the answer. Default: none."
    ),
]
Policy = Annotated[
    str | None, typer.Option(help="How far drafts go, such as fixed:4. Default: the services' settings.")
]
Model = Annotated[str, typer.Option(help="Name of the target, where the orchestrator serves several.")]
Session = Annotated[str, typer.Option(help="Name of the session. Default: a new name.")]
Tenant = Annotated[str, typer.Option(help="Tenant that the request belongs to.")]
Timeout = Annotated[Float, typer.Option(help="Give up after this many seconds. Default: never.")]
