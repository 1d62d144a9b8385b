"""Command class that keeps the help texts of arguments."""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperCommand
from typer.utils import get_params_from_function


class Command(TyperCommand):
    """Command that shows the declared help of its arguments: from click 8.5 on, click's own class empties it."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        function = getattr(self.callback, "__wrapped__", None)
        declared = get_params_from_function(function) if function else {}
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and parameter.name in declared:
                parameter.help = getattr(declared[parameter.name].default, "help", None)
