"""What only the coordinator's end uses of Flower's internals; it loads far more of Flower than a site needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from shoal.federation.flower.internals import unusable

_DATABASES = {
    "flwr.supercore.object_store.sql_object_store": "SqlObjectStore",
    "flwr.server.superlink.linkstate.sql_linkstate": "SqlLinkState",
}
"""Flower's states in a database, by module. They load SQLAlchemy and Alembic; this link's state is in memory."""


@contextmanager
def _databases_deferred() -> Iterator[None]:
    """Let Flower's factories find, instead of these classes, functions that import them when they are called."""
    absent = {module: name for module, name in _DATABASES.items() if module not in sys.modules}
    for module, name in absent.items():
        sys.modules[module] = ModuleType(module)

        def made(*given: Any, module: str = module, name: str = name) -> Any:
            return getattr(import_module(module), name)(*given)

        setattr(sys.modules[module], name, made)
    try:
        yield
    finally:
        for module in absent:
            del sys.modules[module]


try:
    with _databases_deferred():
        from flwr.app.error import Error as Error
        from flwr.app.message import make_message as make_message
        from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
        from flwr.common.constant import NOOP_ACCOUNT_NAME as NOOP_ACCOUNT_NAME
        from flwr.common.constant import NOOP_FLWR_AID as NOOP_FLWR_AID
        from flwr.proto import fab_pb2 as fab_pb2
        from flwr.proto import run_pb2 as run_pb2
        from flwr.proto.node_pb2 import NodeInfo as NodeInfo
        from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState as InMemoryLinkState
        from flwr.supercore.constant import NOOP_FEDERATION_ID as NOOP_FEDERATION_ID
        from flwr.supercore.constant import TaskType as TaskType
        from flwr.supercore.date import now as now
        from flwr.supercore.error import FlowerError as FlowerError
        from flwr.supercore.error.catalog import API_ERROR_MAP as API_ERROR_MAP
        from flwr.supercore.object_store import ObjectStoreFactory as ObjectStoreFactory
        from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE as PROTOBUF_MEDIA_TYPE
        from flwr.supercore.task_identity import TaskIdentity as TaskIdentity
        from flwr.superlink.federation import NoOpFederationManager as NoOpFederationManager
        from flwr.superlink.servicer.fleet import fleet_handlers as fleet_handlers
except ImportError as error:
    raise unusable(error) from error
