"""Areas: folders whose sources are compiled together (folder.bzl).

An area must be closed: no folder outside it may lie on a path of dependencies between two of its
folders. Fewer units compile faster from nothing; more units compile faster after a change.
"""

# Label of the area's library -> folders, in the order of their sources; number of translation units.
AREAS = {
    # Values and pure functions: options, layouts, programs, plans.
    "//common:values": struct(
        units = 2,
        folders = [
            "common/attention",
            "common/layout",
            "common/program",
            "common/schedule",
            "common/plan",
        ],
    ),
    # What the three programs share in order to serve: the wire, security, logs, metrics.
    "//common:serving": struct(
        units = 3,
        folders = [
            "common/observability",
            "common/security",
            "common/process",
            "common/wire/grpc_1_51",
            "common/wire",
            "common/request",
            "common/kv",
        ],
    ),
    "//server:coordinator": struct(
        units = 2,
        folders = [
            "server/core/events",
            "server/core/ring",
            "server/core/kv",
            "server/core/requests",
            "server/core/loss",
            "server/core",
        ],
    ),
    "//server:service": struct(
        units = 4,
        folders = [
            "server/identity",
            "server/planning",
            "server/edge/header",
            "server/edge/access",
            "server/edge/data",
            "server/edge/loop",
            "server/edge/status",
            "server/edge/call",
            "server/edge/kv",
            "server/edge/services",
            "server/edge",
        ],
    ),
    "//worker:member": struct(
        units = 4,
        folders = [
            "worker/executor",
            "worker/operation",
            "worker/region",
            "worker/direct",
            "worker/kv",
            "worker/measurement",
            "worker/service",
        ],
    ),
    "//client:calls": struct(
        units = 2,
        folders = [
            "client/transfer",
            "client/stream",
            "client/call",
            "client/kv",
        ],
    ),
    "//client:command_line": struct(
        units = 4,
        folders = [
            "client/files",
            "client/load",
            "client/launcher",
            "client/cli",
            "client/cli/bench",
            "client/cli/commands",
        ],
    ),
}

_AREA_OF = {folder: label for label, area in AREAS.items() for folder in area.folders}

def area_of(folder):
    """The area's label of a folder without leading slashes, or None."""
    return _AREA_OF.get(folder)
