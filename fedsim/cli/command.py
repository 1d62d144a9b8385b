"""A command that says in its `--help` what its arguments are."""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperCommand
from typer.utils import get_params_from_function


class Command(TyperCommand):
    """Gives arguments back the help that they were declared with: from click 8.5 on, click's own empties it."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        function = getattr(self.callback, "__wrapped__", None)
        declared = get_params_from_function(function) if function else {}
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and parameter.name in declared:
                parameter.help = getattr(declared[parameter.name].default, "help", None)
