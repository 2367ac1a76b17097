"""The errors a user meets, and the exit codes of `python launch/*`.

A message names the key or file, the value, the rule with its numbers, and the next step. The entry points print the
message alone; a traceback reaches a user only for a fault of our own.
"""

EXIT_DONE = 0
EXIT_USER_ERROR = 2
EXIT_DOES_NOT_FIT = 3
EXIT_STOPPED_RESUMABLE = 75


class TonnageError(Exception):
    """A fault the user can mend. `exit_code` is what the process returns."""

    exit_code = EXIT_USER_ERROR


class ConfigError(TonnageError):
    """A key, a value or a combination of them that cannot be run."""


class UnknownFamily(ConfigError):
    """A config.json whose model_type is not counted by hand."""


class DataError(TonnageError):
    """A data set, a record of it, or what is left of it after preparation."""


class ModelError(TonnageError):
    """Weights, tokenizer or model folder that are missing, unreadable or not what was expected."""


class CheckpointError(TonnageError):
    """A checkpoint that cannot be written, read or continued from."""


class DoesNotFit(TonnageError):
    """More memory is needed than there is."""

    exit_code = EXIT_DOES_NOT_FIT


class TrainingError(TonnageError):
    """A run that would go on without learning: repeated non-finite gradients, dead parameters."""

    exit_code = 1
