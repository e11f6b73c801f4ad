"""The removal of a document: done once no request can use it, though its bytes may stay for a while."""

from kvlink.core.errors import StoreError
from kvlink.engine.library import Library


def removed(library: Library, one: str, *, scope: bytes) -> bool:
    """Remove a document. Runs in the engine's thread.

    Returns:
        Whether all of its bytes are gone, too; where they are not, the next removal goes on.

    Raises:
        InputError: There is none of this id.
        StoreError: It is still there, and used: the library's file cannot be written.
    """
    try:
        return library.remove(one, scope=scope)
    except StoreError:
        if library.known([one], scope=scope):
            raise
        return False
