"""Of the routes of Dynamo and Mooncake, as their clients send and read them."""

from __future__ import annotations

from kvstrata_server.examples.world import KEYS, LOCAL_HASHES, MODEL, TOKENS

__all__ = ["EXAMPLES"]

_OVERLAP = {
    "scores": {},
    "frequencies": [],
    "instances": {
        "1": {"longest_matched": 32, "gpu": 0, "dp": {"0": 0}, "cpu": 16, "disk": 32},
    },
}

EXAMPLES = {
    "register_instance": (
        {
            "instance_id": 1,
            "endpoint": "tcp://10.0.0.7:5557",
            "replay_endpoint": "tcp://10.0.0.7:5558",
            "model_name": MODEL,
            "block_size": 16,
        },
        {"status": "ok"},
    ),
    "unregister_instance": ({"instance_id": 1, "model_name": MODEL}, {"status": "ok"}),
    "query_prefix": ({"model_name": MODEL, "token_ids": TOKENS}, _OVERLAP),
    "query_prefix_by_hash": ({"model_name": MODEL, "block_hashes": LOCAL_HASHES}, _OVERLAP),
    "list_workers": (
        None,
        [
            {
                "instance_id": 1,
                "source": "zmq",
                "status": "active",
                "model_name": MODEL,
                "routing_group": "default",
                "block_size": 16,
                "endpoints": {"0": "tcp://10.0.0.7:5557"},
                "listeners": {"0": {"endpoint": "tcp://10.0.0.7:5557", "status": "active"}},
            }
        ],
    ),
    "dump": (
        None,
        {
            f"{MODEL}:default": {
                "block_size": 16,
                "events": [
                    {
                        "worker_id": 1,
                        "storage_tier": "host_pinned",
                        "residency_domain": "worker",
                        "event": {
                            "event_id": 0,
                            "data": {
                                "stored": {
                                    "parent_hash": None,
                                    "start_position": None,
                                    "blocks": [
                                        {
                                            "block_hash": int(KEYS[0][-16:], 16),
                                            "tokens_hash": LOCAL_HASHES[0],
                                            "mm_extra_info": None,
                                        }
                                    ],
                                }
                            },
                            "dp_rank": 0,
                        },
                    }
                ],
            }
        },
    ),
}
