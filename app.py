"""Starts the web page: `python app.py`, `make demo`, or a Hugging Face Space, which runs this file.

Arguments -> `Settings` -> `demo` -> launch. Nothing heavy is imported here; models load when somebody asks
for them.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from workbench.commands.common import add_side_arguments, side_options
from workbench.ui import Settings, build, launch_options
from workbench.ui.zero import on_zero_gpu, register


def parse(arguments: list[str]) -> Settings:
    """Command-line arguments as settings."""
    from workbench.errors import InputError

    parser = argparse.ArgumentParser(
        description="KV Handoff Workbench: change models in the middle of a conversation."
    )
    parser.add_argument(
        "--pair", default="embedded", help="a pair of the catalog (see `python -m workbench pairs`)"
    )
    parser.add_argument(
        "--source", help="a small model instead: hub id, folder or GGUF file (needs --target)"
    )
    parser.add_argument("--target", help="the large model that goes with --source")
    parser.add_argument("--direction", choices=["up", "down"], default="up", help="down swaps the two")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    parser.add_argument(
        "--port", type=int, default=int(os.environ.get("PORT") or 7860), help="default: 7860, or PORT"
    )
    parser.add_argument(
        "--public", action="store_true", help="for strangers: no free model names, small fits only"
    )
    parser.add_argument("--device-map", default="auto", help="as for accelerate (default: auto)")
    parser.add_argument("--max-memory", help="for example cpu=4GiB,0=10GiB")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    add_side_arguments(parser)
    parser.add_argument("--queue", type=int, default=16, help="requests that may wait (default: 16)")
    parser.add_argument(
        "--policy", help="JSON file with bars; a pair that misses them is not mapped, or with a warning"
    )
    parser.add_argument("--debug", action="store_true", help="log words of errors and tracebacks")
    args = parser.parse_args(arguments)
    try:
        policy = None
        if args.policy:
            from pathlib import Path

            from workbench.approval import read_policy

            policy = read_policy(Path(args.policy))
        return Settings(
            pair=args.pair,
            source=args.source,
            target=args.target,
            direction=args.direction,
            host=args.host,
            port=args.port,
            public=args.public or bool(os.environ.get("SPACE_ID")),  # a Space is open to everybody
            device_map="cpu" if on_zero_gpu() else args.device_map,
            dtype=args.dtype,
            max_memory=args.max_memory,
            by_side=side_options(args),
            queue_size=args.queue,
            policy=policy,
            debug=args.debug,
        )
    except (ValueError, InputError) as error:
        parser.error(str(error))


gpu = register()  # before anything imports torch
settings = parse(sys.argv[1:] if __name__ == "__main__" else [])
logging.basicConfig(
    level=logging.DEBUG if settings.debug else logging.INFO, format="%(asctime)s %(name)s %(message)s"
)
for chatty in ("httpx", "httpcore", "asyncio", "urllib3", "matplotlib"):
    logging.getLogger(chatty).setLevel(logging.WARNING)
demo = build(settings)

if __name__ == "__main__":
    options = launch_options(settings)
    print(f"KV Handoff Workbench: http://{options['server_name']}:{options['server_port']}", flush=True)
    demo.launch(**options)
