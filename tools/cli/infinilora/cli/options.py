"""Options that several commands share. Those that say where a system is are also read from the environment."""

from pathlib import Path
from typing import Annotated

import typer

from infinilora.cli.models import DEMO_MODELS

DEFAULT_URL = "http://127.0.0.1:8000"

Model = Annotated[str, typer.Option("--model", help=f"{', '.join(DEMO_MODELS)}, or a Hugging Face directory.")]
VarDir = Annotated[
    Path,
    typer.Option("--var-dir", envvar="INFINILORA_VAR_DIR", help="Where models, data, logs and secrets are kept."),
]
Url = Annotated[
    str,
    typer.Option("--url", envvar="INFINILORA_URL", help="The gateway. Default: the system of --var-dir, or port 8000."),
]
ApiKey = Annotated[str, typer.Option("--api-key", envvar="INFINILORA_API_KEY", help="If the gateway asks for one.")]
Tenant = Annotated[
    str, typer.Option("--tenant", envvar="INFINILORA_TENANT", help="Whose adapters; by default those of the key.")
]
Coordinator = Annotated[
    str,
    typer.Option("--coordinator", envvar="INFINILORA_COORDINATOR_URL", help="Default: that of --var-dir's system."),
]
AdminKey = Annotated[
    str,
    typer.Option("--admin-key", envvar="INFINILORA_ADMIN_KEY", help="An operator's. Default: --var-dir's system's."),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for programs.")]
