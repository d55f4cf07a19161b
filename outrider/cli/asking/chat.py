"""`outrider chat`: a conversation in the terminal, each token in the colour of its source.

The orchestrator renders the conversation by the model's chat template over HTTP (/tokenize); answers stream
over gRPC, which says of each token where it comes from.
"""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.access import Access, ApiKeyFile, Ca, Cert, CertKey
from outrider.cli.failures import CommandFailed, standard_input, usage
from outrider.wire.incoming.http_url import http_url

if TYPE_CHECKING:
    import ssl
    import urllib.request

    from rich.console import Console

    from outrider.client import Client, Completion
    from outrider.client.options import Options

ASK_S = 60.0
"""Timeout of a call over HTTP, in seconds."""
MOST_BYTES = 64 << 20
"""Most bytes that are read of an HTTP answer."""


def chat(
    address: Annotated[str, typer.Option(help="host:port of the orchestrator.")] = "127.0.0.1:50051",
    url: Annotated[str, typer.Option(help="URL of the orchestrator's HTTP API.")] = "http://127.0.0.1:8000",
    system: Annotated[str, typer.Option(help="System message to begin with.")] = "",
    model: Annotated[str, typer.Option(help="Name of the target, if there are several.")] = "",
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Sample from this probability mass.")] = 0.95,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="End answers after this many tokens. Default: the context's end."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the noise. Default: drawn at random.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without drafts: the same tokens.")] = False,
    api_key_file: ApiKeyFile = "",
    ca: Ca = "",
    cert: Cert = "",
    cert_key: CertKey = "",
) -> None:
    """Talk to the model; each token has the colour of its source.

    Every line is a message; the end of the input ends the conversation. Without a terminal, or with NO_COLOR
    set, answers are plain text.

    \b
    Examples:
      outrider chat
      echo "What is a suffix array?" | outrider chat --temperature 0 >answer.txt
    """
    from rich.console import Console

    from outrider.cli.asking.colours import print_legend

    access = Access(api_key_file, ca, cert, cert_key)
    options: Options = {"temperature": temperature, "top_p": top_p, "speculation": not plain, "model": model}
    if seed is not None:
        options["seed"] = seed
    console = Console(highlight=False, soft_wrap=True)
    with access.client(address) as client:
        talk = TerminalChat(client, HttpFront(url, access), options, max_tokens, system)
        if console.is_terminal:
            print_legend(console)
        for line in _lines(console):
            talk.say(line, console)


class HttpFront:
    """The parts of the HTTP API that a conversation needs."""

    def __init__(self, url: str, access: Access) -> None:
        if http_url(url) is None:
            raise usage(f"--url {url!r} is not the URL of an HTTP API, such as http://127.0.0.1:8000")
        self._url = url.rstrip("/")
        self._access = access

    def rendered(self, messages: Sequence[dict[str, str]], model: str) -> tuple[list[int], int]:
        """Token ids of a conversation up to its next answer, and the longest context of the model."""
        said = self._post("/tokenize", {"messages": list(messages), **({"model": model} if model else {})})
        return said["tokens"], said["max_model_len"]

    def text_of(self, ids: Sequence[int], model: str) -> str:
        """The text of token ids."""
        said = self._post("/detokenize", {"tokens": list(ids), **({"model": model} if model else {})})
        text: str = said["prompt"]
        return text

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        import ssl
        import urllib.error
        import urllib.request

        headers = {"content-type": "application/json"}
        if key := self._access.api_key():
            headers["authorization"] = f"Bearer {key}"
        context = None
        if self._url.startswith("https:"):
            context = ssl.create_default_context(cafile=self._access.ca or None)
            if self._access.cert:
                context.load_cert_chain(self._access.cert, self._access.cert_key or None)
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        try:
            with _opener(context).open(request, timeout=ASK_S) as answer:
                found: dict[str, Any] = json.loads(answer.read(MOST_BYTES))
                return found
        except urllib.error.HTTPError as error:
            if moved := error.headers.get("location"):
                raise CommandFailed(
                    f"{self._url} sends elsewhere, to {moved!r}; the API key was not sent there: if the "
                    "orchestrator is there, give its URL by --url"
                ) from error
            raise CommandFailed(_refusal(error.read(MOST_BYTES), error.code)) from error
        except (OSError, ValueError) as error:
            raise CommandFailed(
                f"no answer from {self._url}{path}: {error}; give the URL that `outrider up` prints by --url",
                "UNAVAILABLE",
            ) from error


class TerminalChat:
    """Messages so far, and the next answer."""

    def __init__(
        self, client: "Client", front: HttpFront, options: "Options", max_tokens: int | None, system: str
    ) -> None:
        self._client = client
        self._front = front
        self._options = options
        self._max_tokens = max_tokens
        self._model = options.get("model") or ""
        self._messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str, console: "Console") -> None:
        """Sends a message and prints the answer as it arrives. Raises OutriderError, CommandFailed."""
        from outrider.cli.asking.colours import print_from, texts_by_source

        messages = [*self._messages, {"role": "user", "content": text}]
        ids, longest = self._front.rendered(messages, self._model)
        room = longest - len(ids)
        if room < 1:
            raise CommandFailed(
                f"the conversation has {len(ids)} tokens, and the model's context {longest}: begin a new chat"
            )
        options = {**self._options, "ids": ids, "max_tokens": min(room, self._max_tokens or room)}
        stream = self._client.stream(**options)  # type: ignore[arg-type]
        for chunk in stream:
            if not console.is_terminal:
                print(chunk.text, end="", flush=True)
                continue
            for piece, source in texts_by_source(chunk.text, chunk.ids, chunk.sources, self._text_of):
                print_from(console, piece, source)
        completion = stream.completion()
        print(flush=True)
        if console.is_terminal:
            console.print(f"[dim]{_figures(completion)}[/dim]")
        self._messages = [*messages, {"role": "assistant", "content": completion.text}]

    def _text_of(self, ids: Sequence[int]) -> str:
        return self._front.text_of(ids, self._model)


def _opener(context: "ssl.SSLContext | None") -> "urllib.request.OpenerDirector":
    """Opens URLs without following redirects: urllib would send the API key on to any other host."""
    import urllib.request

    class Staying(urllib.request.HTTPRedirectHandler):
        """Makes an error of every redirect."""

        def redirect_request(self, *_: Any) -> None:
            return None

    return urllib.request.build_opener(Staying, urllib.request.HTTPSHandler(context=context))


def _figures(completion: "Completion") -> str:
    usage = completion.usage
    return f"{usage.completion_tokens} tokens, {usage.acceptance_length:.2f} a round"


def _lines(console: "Console") -> Iterator[str]:
    """Messages of the user: lines of a terminal after a mark, or of a pipe; blank lines are left out."""
    given = standard_input()
    if not (given.isatty() and console.is_terminal):
        yield from (line.strip() for line in given if line.strip())
        return
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line


def _refusal(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the HTTP API answered {status}"
