"""What to do about the base model that an adapter's own config names. Pure; nothing is looked up by that name.

The name is a trainer's: often a path of a laptop, a hub's name, or nothing at all. Only one that is known here as
*another* base model says something: the shapes may fit, and the answers would be nonsense.
"""

from collections.abc import Mapping
from typing import Literal

from infinilora.protocol.adapter import AdapterWarning
from infinilora.protocol.errors import AdapterInvalid
from infinilora.protocol.ids import Fingerprint

Policy = Literal["warn", "refuse", "ignore"]
CODE = "declared_base"


def check_declared(
    declared: str, base: Fingerprint, known: Mapping[str, Fingerprint | None], policy: Policy
) -> tuple[AdapterWarning, ...]:
    """Warnings about a declared base, or AdapterInvalid where the policy is to refuse.

    `known` has the names of base models, aliases among them; None stands for a base that is not served now.
    """
    meant = _meanings(declared, known)
    if policy == "ignore" or not meant or base in meant.values():
        return ()
    ours = " or ".join(f"'{name}'" for name, other in sorted(known.items()) if other == base) or base
    text = (
        f"adapter_config.json: base_model_name_or_path: found '{declared[:200]}', which is base model "
        f"'{min(meant)}' here; wanted {ours}"
    )
    if policy == "refuse":
        raise AdapterInvalid(f"{text} (INFINILORA_DECLARED_BASE is 'refuse')")
    return (AdapterWarning(code=CODE, text=text),)


def _meanings(declared: str, known: Mapping[str, Fingerprint | None]) -> dict[str, Fingerprint | None]:
    """The base models that a declared name may mean: by the whole name if one has it, else by its last part."""
    whole = declared.strip().rstrip("/").casefold()
    exact = {name: base for name, base in known.items() if name.casefold() == whole}
    last = whole.rpartition("/")[2]
    return exact or {name: base for name, base in known.items() if last and name.casefold() == last}
