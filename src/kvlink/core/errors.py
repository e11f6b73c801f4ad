"""Every error that KVLink raises on purpose, as one tree.

    KVLinkError
    |- InputError              the request cannot be carried out as asked
    |  |- EmptyQuestion
    |  |- ContextOverflow
    |  |- DeviceOverflow       the documents take more than the whole budget of the device
    |- DeviceBusy              the device's budget is held by other requests: ask again when one has ended
    |- QueueFull               so many requests wait that another one is not taken
    |- Cancelled               a request was given up by its caller, or by an engine that closes
    |- DeadlineExceeded        a request was not answered in time
    |- ModelError              the model, or something beside its weights, cannot be used
    |  |- ModelRefused         it could be loaded, but reuse would not be exact
    |  |- TextUnavailable      no tokenizer: only token ids can be handled
    |  |- BundleRefused        link tokens that were trained for other weights, or cannot be read
    |- TrainingDiverged        the loss is no number any more
    |- StoreError
       |- DamagedObject        bytes do not verify; never served, the entry is encoded again
       |- StoreFull            a byte budget or the disk is exhausted
       |- StoreUnusable        unwritable, foreign, or of another format

    KVLinkWarning (a UserWarning) says what was restricted or left out while the rest was carried out.

A message says what was asked, what was found, and what to do.
"""

from functools import partial


class KVLinkError(Exception):
    """Base of all errors raised by KVLink on purpose."""


class InputError(KVLinkError, ValueError):
    """The request cannot be carried out as asked."""


class EmptyQuestion(InputError):
    """The question holds no token to compute."""


class ContextOverflow(InputError):
    """The prompt with its link tokens and answer does not fit the model's context.

    Attributes:
        over: Tokens too many.
        limit: Tokens that the context holds.
    """

    def __init__(self, message: str, *, over: int, limit: int) -> None:
        super().__init__(message)
        self.over = over
        self.limit = limit

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), over=self.over, limit=self.limit), self.args


class DeviceOverflow(InputError):
    """The documents of one request take more than the whole budget of the device."""


class DeviceBusy(KVLinkError):
    """Other requests hold so much of the device's budget that this one has to wait."""


class QueueFull(KVLinkError):
    """So many requests wait already that another one is not taken; try again later."""


class Cancelled(KVLinkError):
    """The caller, or an engine that closes, gave a request up."""


class DeadlineExceeded(KVLinkError):
    """A request was not answered by the moment that its caller named."""


class ModelError(KVLinkError):
    """The model, or something beside its weights, cannot be used."""


class ModelRefused(ModelError):
    """The model was loaded, but reuse of its keys and values would not be exact."""


class TextUnavailable(ModelError):
    """There is no tokenizer, so text cannot become ids."""


class BundleRefused(ModelError):
    """A bundle of link tokens cannot be used with this model."""


class TrainingDiverged(KVLinkError):
    """Training came to a loss that is no number, again and again."""


class StoreError(KVLinkError):
    """A store could not do what its contract promises."""


class DamagedObject(StoreError):
    """The bytes of an object do not verify."""


class StoreFull(StoreError):
    """A byte budget or the disk is exhausted."""


class StoreUnusable(StoreError):
    """The store cannot be read or written: permissions, a foreign folder, or another format."""


class KVLinkWarning(UserWarning):
    """Something was left out or done otherwise than asked, and the rest was carried out."""
