"""Write the Python modules of the .proto files: `python tools/generate_protos.py`. Needs grpcio-tools (`.[dev]`)."""

import argparse
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "serving" / "proto"
TARGETS = {
    "amoeba/v1/inference.proto": ROOT / "amoeba_jax" / "client" / "_proto",
    "inference/open_inference.proto": ROOT / "serving" / "grpc_server" / "_proto",
}


def generate(proto: str, directory: Path) -> list[Path]:
    """Write the modules of one .proto file into a directory and return their paths."""
    with tempfile.TemporaryDirectory() as temporary:
        arguments = ["protoc", f"-I{PROTOS}", f"-I{files('grpc_tools') / '_proto'}"]
        arguments += [f"--{kind}_out={temporary}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main([*arguments, str(PROTOS / proto)]) != 0:
            raise SystemExit(f"protoc refuses {proto}")
        folder, package = Path(temporary, proto).parent, proto.rsplit("/", 1)[0].replace("/", ".")
        written = []
        for file in sorted(folder.iterdir()):
            text = file.read_text(encoding="utf-8").replace(f"from {package} import", "from . import")
            # The protocol's other implementations define the same names: those may be in this process too.
            if package == "inference":
                text = text.replace("_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()")
            written.append(directory / file.name)
            file.write_text(text, encoding="utf-8")
            shutil.move(file, written[-1])
    return written


def main() -> None:
    """Write all modules. With `--check`, compare them with the present files instead."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something would change")
    check = parser.parse_args().check
    stale = []
    for proto, target in TARGETS.items():
        if not check:
            generate(proto, target)
            continue
        with tempfile.TemporaryDirectory() as temporary:
            for file in generate(proto, Path(temporary)):
                committed = target / file.name
                if not committed.exists() or committed.read_text(encoding="utf-8") != file.read_text(encoding="utf-8"):
                    stale.append(str(committed.relative_to(ROOT)))
    if stale:
        sys.exit(f"not up to date, run tools/generate_protos.py: {', '.join(stale)}")


if __name__ == "__main__":
    main()
