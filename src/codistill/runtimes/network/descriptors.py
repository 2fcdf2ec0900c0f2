"""How many connections a process can hold beside the files that it must be able to write."""

from __future__ import annotations

from codistill.errors import NetworkError

LINKS = 3  # of one node at a time: one that has restarted, and one whose end was not noticed yet
_FILES = 160  # descriptors for files, libraries and pipes of this process
# Connections that may be pending at a time: the first number, or an eighth of all descriptors, up to the second one.
# One that is closed is opened again by whoever attacks; one that may wait costs a descriptor and nothing else.
_FEW, _MOST = 128, 4096
_FEWEST = 16
_ENOUGH = 1 << 16


def reserve_descriptors(nodes: int) -> int:
    """How many connections of unknown callers may be pending beside links to so many nodes.

    Raises the limit of this process as far as it may; an error if even so there are too few.
    """
    try:
        import resource
    except ImportError:
        return _MOST  # a system without such a limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        return _MOST
    free = soft - _FILES - LINKS * nodes
    if free < _FEWEST:
        raise NetworkError(
            f"A node with links to {nodes} others needs {_FILES + LINKS * nodes + _FEWEST} file descriptors.",
            f"this process may have {soft}",
            "Raise the limit: 'ulimit -n 65536' in the shell, LimitNOFILE=65536 in a systemd unit.",
        )
    return min(_MOST, max(_FEW, soft // 8), free // 2)
