"""All that Shoal uses of Flower's internals: here what both ends need, in `link` what only the coordinator needs.

Flower means to keep `flwr.app`, `flwr.clientapp` and `flwr.serverapp` stable. Anything else may move in any release,
so it is imported here and nowhere else; a contract test names what another version lacks.
"""

from __future__ import annotations

import os

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}  # read when flwr is imported

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from shoal.errors import ConfigError

TESTED = "1.41"


def unusable(error: ImportError) -> ConfigError:
    """Return the error for a version of Flower that lacks something."""
    from importlib.metadata import version

    return ConfigError(
        f"flwr {version('flwr')} cannot be used: {error}; install the version that Shoal was tested with: "
        f"pip install 'flwr=={TESTED}.*'"
    )


try:
    from flwr.app import Message as Message
    from flwr.app.message import remove_content_from_message as remove_content_from_message
    from flwr.common.serde import message_from_proto as message_from_proto
    from flwr.common.serde import message_to_proto as message_to_proto
    from flwr.proto import fleet_pb2 as fleet_pb2
    from flwr.proto import heartbeat_pb2 as heartbeat_pb2
    from flwr.proto import message_pb2 as message_pb2
    from flwr.proto.node_pb2 import Node as Node
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects as get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_object import get_object_tree as get_object_tree
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree as iterate_object_tree
    from flwr.supercore.inflatable.inflatable_object import no_object_id_recompute as no_object_id_recompute
    from flwr.supercore.inflatable.inflatable_utils import (
        inflate_object_from_contents as inflate_object_from_contents,
    )
    from flwr.supercore.protobuf.client import ProtobufCall as ProtobufCall
    from flwr.supercore.protobuf.client import ProtobufClientInterceptor as ProtobufClientInterceptor
    from flwr.supercore.protobuf.client import ProtobufRequestContext as ProtobufRequestContext
    from flwr.supernode.fleet_http_client import FleetHttpClient as FleetHttpClient
except ImportError as error:
    raise unusable(error) from error


def flower_interceptors(key: EllipticCurvePrivateKey) -> list[ProtobufClientInterceptor]:
    """What a SuperNode adds to its requests for Flower's own SuperLink: versions, and a signed timestamp."""
    try:  # here, since they load the web framework
        from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
    except ImportError as error:
        raise unusable(error) from error

    return [RuntimeVersionHttpInterceptor("SuperNode"), NodeAuthHttpInterceptor(key, key.public_key())]
