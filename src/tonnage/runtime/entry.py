"""The last frame of every command: errors become one clear text and an exit code, never a traceback on the console."""

import difflib
import errno
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from tonnage.errors import EXIT_STOPPED_RESUMABLE, EXIT_USER_ERROR, ConfigError, TonnageError
from tonnage.runtime.logs import LOG


def guarded(main: Callable[[], int], quiet: bool = False) -> int:
    """Run `main`; returns its exit code, or that of the error it ended with.

    Args:
        quiet: this rank's errors are repeated by rank 0; write them to its log only.
    """
    try:
        return main()
    except TonnageError as error:
        LOG.debug(f"error: {error}")
        if not quiet:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped at once, without a checkpoint of the last steps", file=sys.stderr, flush=True)
        return EXIT_STOPPED_RESUMABLE
    except BrokenPipeError:  # `... | head` has read enough
        sys.stdout = open(os.devnull, "w")
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            report_fault(error)
            return 1
        print(f"error: no space left ({error.filename or 'on the disk of the run folder'}); free some and go on with "
              f"run=FOLDER", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    except Exception as error:
        report_fault(error)
        return 1


def run_script(script: Path, *words: str) -> int:
    """Run a launch script and wait for it, whatever is typed meanwhile: Ctrl-C reaches it too, and it stops in order."""
    process = subprocess.Popen([sys.executable, str(script), *words])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code


def report_fault(error: Exception) -> None:
    """An error of our own: the traceback goes to the log file of the rank, its place to the console."""
    LOG.debug("fault", exc_info=error)
    files = [handler.baseFilename for handler in LOG.handlers if hasattr(handler, "baseFilename")]
    if files:
        with open(files[0], "a") as log:
            traceback.print_exception(error, file=log)
        where = f"the traceback is in {files[0]}"
    else:
        file = Path("tonnage-fault.log")
        file.write_text("".join(traceback.format_exception(error)))
        where = f"the traceback is in {file.resolve()}"
    text = (str(error).strip() or repr(error)).splitlines()[0]
    print(f"fault: {type(error).__name__}: {text}\n{where}; please report it with the command line",
          file=sys.stderr, flush=True)


def read_options(argv: list[str], defaults: dict, choices: dict[str, tuple[str, ...]]) -> dict:
    """`key=value` words over `defaults`, for commands with a handful of keys of their own.

    Raises:
        ConfigError: an unknown key (with the nearest) or choice.
    """
    options = dict(defaults)
    for word in argv:
        name, separator, value = word.partition("=")
        if not separator or name not in defaults:
            near = difflib.get_close_matches(name, defaults, n=1)
            raise ConfigError(f"{word or repr(word)}: no such key" + (f"; did you mean {near[0]}=?" if near else
                                                        f"; there are {', '.join(defaults)}, as key=value"))
        if value not in choices.get(name, (value,)):
            raise ConfigError(f"{word}: must be {' or '.join(choices[name])}")
        options[name] = value
    return options
