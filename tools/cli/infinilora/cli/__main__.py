"""`infinilora`: one command for the whole system."""

import typer

from infinilora.cli import adapter_commands, admin_commands, bench_commands, model_commands, simulate_command
from infinilora.cli.chat_command import chat
from infinilora.cli.plan_command import plan
from infinilora.cli.status_command import status, top
from infinilora.cli.up import up

app = typer.Typer(
    name="infinilora",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serve thousands of LoRA adapters over a few shared base models.",
)
app.command()(up)
app.command()(chat)
app.command()(status)
app.command()(top)
app.command()(plan)
for command in admin_commands.COMMANDS:
    app.command(rich_help_panel="By hand, audited")(command)
app.add_typer(adapter_commands.app, name="adapter")
app.add_typer(model_commands.app, name="model")
app.add_typer(bench_commands.app, name="bench")
app.add_typer(simulate_command.app, name="simulate")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
