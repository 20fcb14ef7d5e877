"""`python -m eval`: perplexity, passkey, ruler, lm-eval, speed, demo."""

import sys

import typer
from rich.markup import escape
from transformers.utils import logging

from eval import demo
from eval.commands import console, lm_eval, passkey, perplexity, ruler, speed

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)


def main() -> None:
    """Runs the subcommand; wrong input is one line that says what to do, not a traceback."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        app()
    except ValueError as error:
        console.print("[red]Error:[/]", escape(str(error)), soft_wrap=True)
        sys.exit(2)


app.command("perplexity")(perplexity.command)
app.command("passkey")(passkey.command)
app.command("ruler")(ruler.command)
app.command("lm-eval")(lm_eval.command)
app.command("speed")(speed.command)
app.command("demo")(demo.command)

if __name__ == "__main__":
    main()
