"""`python -m eval`: perplexity, passkey, needle, ruler, speed, demo."""

import sys

import typer
from transformers.utils import logging

from eval import demo
from eval.commands import console, needle, passkey, perplexity, ruler, speed

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)


def main() -> None:
    """Runs the subcommand; wrong input is one line that says what to do, not a traceback."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        app()
    except ValueError as error:
        console.print("[red]Error:[/]", str(error), soft_wrap=True)
        sys.exit(2)


app.command("perplexity")(perplexity.command)
app.command("passkey")(passkey.command)
app.command("needle")(needle.command)
app.command("ruler")(ruler.command)
app.command("speed")(speed.command)
app.command("demo")(demo.command)

if __name__ == "__main__":
    main()
