"""From a command line to settings; `kvstrata.config` gives the flags and their help."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from kvstrata.config import what_is_wrong
from kvstrata.errors import ConfigError

__all__ = ["Parser", "settings_from"]

S = TypeVar("S", bound=BaseSettings)

_FILE = "KVSTRATA_CONFIG"


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and raises `ConfigError` rather than exiting."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def settings_from(schema: type[S], argv: Sequence[str], prog: str) -> S:
    """Settings by flags, then environment, then file, then defaults.

    Every name of the schema is a flag (`--host.capacity 4GiB`, lists as JSON), and `--config`
    names the file. Raises `ConfigError` with the settings that are wrong, and `SystemExit` after
    printing `--help`.
    """
    parser = Parser(prog, (schema.__doc__ or "").strip())
    parser.add_argument("--config", metavar="FILE", help=f"settings file, TOML [env: {_FILE}]")
    # The file must be known before the other sources are read.
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--config")
    try:
        file = early.parse_known_args(list(argv))[0].config
    except argparse.ArgumentError as e:
        parser.error(str(e))
    with _config_file(file):
        try:
            flags: CliSettingsSource[Any] = CliSettingsSource(
                schema,
                root_parser=parser,
                cli_parse_args=list(argv),
                cli_kebab_case=True,
                cli_implicit_flags=True,
                cli_avoid_json=True,
                cli_hide_none_type=True,
                cli_show_env_vars=True,
                cli_use_class_docs_for_groups=True,
            )
            return schema(_cli_settings_source=flags)
        except ValidationError as e:
            raise ConfigError(f"{what_is_wrong(e)} (see `{prog} --help`)") from e
        except SettingsError as e:
            raise ConfigError(
                f"{e}: lists and tables are written as JSON (see `{prog} --help`)"
            ) from e
        except tomllib.TOMLDecodeError as e:
            raise ConfigError(f"{os.environ[_FILE]}: {e}") from e
        except UnicodeDecodeError as e:
            raise ConfigError(f"{os.environ[_FILE]} is not TOML: it must be UTF-8 text") from e
        except OSError as e:
            raise ConfigError(f"{os.environ[_FILE]} can't be read: {e.strerror}") from e


@contextmanager
def _config_file(flag: str | None) -> Iterator[None]:
    """The settings file in the environment, where the schema looks for it."""
    before = os.environ.get(_FILE)
    path = flag if flag is not None else before
    if path and not Path(path).is_file():
        state = "is not a file" if Path(path).exists() else "does not exist"
        raise ConfigError(f"settings file {path} {state}")
    try:
        if flag is not None:
            os.environ[_FILE] = flag
        yield
    finally:
        if flag is not None:
            del os.environ[_FILE]
            if before is not None:
                os.environ[_FILE] = before
