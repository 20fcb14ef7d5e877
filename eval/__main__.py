"""`python -m eval`: perplexity, gain, passkey, needle, ruler, compare, lm-eval, speed, fetch, demo."""

import sys

import typer
from rich.console import Console
from rich.markup import escape
from transformers.utils import logging

from eval import demo, processes
from eval.commands import compare, console, fetch, gain, lm_eval, needle, passkey, perplexity, ruler, speed

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)


def main() -> None:
    """Runs the subcommand; wrong input is one line that says what to do, not a traceback."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console.quiet = not processes.is_main()
    try:
        app()
    except (ValueError, OSError) as error:
        Console().print("[red]Error:[/]", escape(str(error)), soft_wrap=True)
        sys.exit(2)


app.command("perplexity")(perplexity.command)
app.command("gain")(gain.command)
app.command("passkey")(passkey.command)
app.command("needle")(needle.command)
app.command("ruler")(ruler.command)
app.command("compare")(compare.command)
app.command("lm-eval")(lm_eval.command)
app.command("speed")(speed.command)
app.command("demo")(demo.command)
app.command("fetch")(fetch.command)

if __name__ == "__main__":
    main()
