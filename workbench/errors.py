"""One error class for each family of failures.

Every message is one line: what failed, where, and what to do about it. The command line prints it
and exits with status 1; nothing else prints a traceback for a failure that a user can cause.
"""


class WorkbenchError(Exception):
    """Base of every named failure. `str(error)` is the one line to show."""


class SpecError(WorkbenchError, ValueError):
    """A field of a spec has a value that it cannot have."""


class CheckpointError(WorkbenchError):
    """A model checkpoint is missing, damaged, unsafe or of a kind that is not supported."""


class StoreError(WorkbenchError):
    """A flash store is damaged, incomplete, of another version, or could not be read or written."""


class ReaderError(StoreError):
    """Flash could not be read as asked: no direct I/O, no io_uring, a short read."""


class AblationError(WorkbenchError):
    """A combination of techniques is undefined, or needs something that was not given."""


class DraftError(WorkbenchError):
    """A draft model cannot work for this model: another vocabulary or another tokenizer."""


class BudgetError(WorkbenchError):
    """The DRAM budget cannot hold what has to be resident."""


class PredictorError(WorkbenchError):
    """Predictors are missing, damaged, or were trained for another model."""


class TrainingError(WorkbenchError):
    """The state of a training run cannot be written or read, or belongs to another request."""


class DataError(WorkbenchError):
    """Text could not be read, or is not in a layout that is understood."""


class RecordError(WorkbenchError):
    """A stored record is missing, damaged or of another schema."""


class DeviceError(WorkbenchError):
    """A backend or device was asked for that this machine or installation does not have."""


class KernelFault(DeviceError):
    """A GPU kernel does what it must not: leaves its arrays, races, waits for threads that never come."""
