"""Search with MMseqs2 and HH-suite, if they are on PATH, in databases of their own formats."""

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warpfold.bulk import run_program
from warpfold.data.formats.alignment import parse_alignment, write_fasta
from warpfold.data.search.database import Engine, SearchQuery, Survey, Tell
from warpfold.errors import UserError
from warpfold.files import opened

# Default limit of rows. `mmseqs` needs a limit, and uses 300 by default.
MMSEQS_ROWS = 10_000
# Bytes at both ends of a file that enter its digest, because whole databases are too large to read.
DIGEST_BYTES = 1 << 20


@dataclass(frozen=True)
class MMseqs2(Engine):
    """`mmseqs search`, iterated with profiles, and `result2msa`, with all queries of a pass in one call.

    sensitivity: MMseqs2's -s. e_value: limit for the alignment and for the profile of the next iteration.
    """

    iterations: int = 3
    e_value: float = 1e-3
    sensitivity: float = 7.5
    name = "mmseqs2"

    def queries_per_pass(self, threads: int) -> int:
        # The start of a call takes seconds for any number of queries.
        return 256

    def identity(self) -> dict[str, Any]:
        program = _find_program("mmseqs", self.name, "apt install mmseqs2, or conda install -c bioconda mmseqs2")
        return {"engine": self.name, "program": run_program([program, "version"]).strip(), **asdict(self)}

    def survey(self, path: Path, tell: Tell) -> Survey:
        return _survey_files(path, ".dbtype", f"Make one with `mmseqs createdb {path} DATABASE`, and pass that.")

    def search(
        self, queries: Sequence[SearchQuery], path: Path, survey: Survey, max_rows: int | None, threads: int, tell: Tell
    ) -> list[str | UserError]:
        """Return A3M rows; see `Engine`. Raises UserError with the last lines of output if the program fails."""
        with tempfile.TemporaryDirectory(prefix="warpfold-mmseqs-") as folder:
            work_folder = Path(folder)
            records = [(str(i), query.sequence) for i, query in enumerate(queries)]
            (work_folder / "queries.fasta").write_text(write_fasta(records), encoding="utf-8")
            query, hits, msa, rows = (str(work_folder / name) for name in ("query", "hits", "msa", "rows"))
            quiet, parallel = ["-v", "1"], ["--threads", str(threads)]
            run_program(["mmseqs", "createdb", str(work_folder / "queries.fasta"), query, *quiet])
            search = ["mmseqs", "search", query, str(path), hits, str(work_folder / "work"), "-a", "1"]
            search += ["--num-iterations", str(self.iterations), "-s", str(self.sensitivity)]
            search += ["-e", str(self.e_value), "--e-profile", str(self.e_value)]
            search += ["--max-seqs", str(max_rows or MMSEQS_ROWS)]
            run_program([*search, *parallel, *quiet])
            # Format 6 is A3M with E-value and ranges in the headers.
            run_program(
                ["mmseqs", "result2msa", query, str(path), hits, msa, "--msa-format-mode", "6", *parallel, *quiet]
            )
            run_program(["mmseqs", "unpackdb", msa, rows, "--unpack-name-mode", "0", "--unpack-suffix", ".a3m", *quiet])
            results: dict[int, str | UserError] = {}
            for file in sorted(Path(rows).glob("*.a3m")):
                text = file.read_text(encoding="utf-8").strip("\0\n")
                # The first row is the query.
                number = int(text.partition("\n")[0].removeprefix(">"))
                results[number] = _extract_rows(text, queries[number], max_rows, "mmseqs")
        return [results.get(i, "") for i in range(len(queries))]


@dataclass(frozen=True)
class HHblits(Engine):
    """hhblits with the settings that AlphaFold2 logs (Supp. 1.2.2).

    These are -n 3 -e 1e-3 -maxseq 1e6 -realign_max 1e5 -maxfilt 1e5 -min_prefilter_hits 1000. AlphaFold2 searches BFD
    and UniRef30 in one run; here each database has a separate run.
    """

    iterations: int = 3
    e_value: float = 1e-3
    name = "hhblits"

    def queries_per_pass(self, threads: int) -> int:
        return 1

    def identity(self) -> dict[str, Any]:
        program = _find_program("hhblits", self.name, "apt install hhsuite, or conda install -c bioconda hhsuite")
        return {"engine": self.name, "program": run_program([program, "-h"]).partition(":")[0].strip(), **asdict(self)}

    def survey(self, path: Path, tell: Tell) -> Survey:
        return _survey_files(path, "_a3m.ffdata", "Pass an HH-suite database without this ending.")

    def search(
        self, queries: Sequence[SearchQuery], path: Path, survey: Survey, max_rows: int | None, threads: int, tell: Tell
    ) -> list[str | UserError]:
        """Return A3M rows; see `Engine`. If the program fails for a query, its last lines of output are the error."""
        results: list[str | UserError] = []
        for query in queries:
            with tempfile.TemporaryDirectory(prefix="warpfold-hhblits-") as folder:
                source, rows = Path(folder, "query.fasta"), Path(folder, "rows.a3m")
                source.write_text(write_fasta([("query", query.sequence)]), encoding="utf-8")
                command = ["hhblits", "-i", str(source), "-d", str(path), "-oa3m", str(rows), "-o", "/dev/null"]
                command += ["-cpu", str(threads), "-n", str(self.iterations), "-e", str(self.e_value)]
                command += ["-maxseq", "1000000", "-realign_max", "100000", "-maxfilt", "100000"]
                try:
                    run_program([*command, "-min_prefilter_hits", "1000", "-v", "1"])
                    results.append(_extract_rows(rows.read_text(encoding="utf-8"), query, max_rows, "hhblits"))
                except UserError as error:
                    results.append(error)
        return results


def _find_program(program: str, engine: str, installation: str) -> str:
    """Return the path of a program. Raises UserError if it is not on PATH."""
    path = shutil.which(program)
    if path is None:
        raise UserError(f"--engine {engine}: `{program}` is not on PATH. Install it ({installation}) or use jackhmmer.")
    return path


def _survey_files(path: Path, ending: str, remedy: str) -> Survey:
    """Survey a database in a program's own format, often a terabyte, by names, sizes and both ends of its files.

    Raises UserError if it does not exist, or if a file cannot be read.
    """
    if not path.with_name(path.name + ending).exists():
        raise UserError(f"{path}: not a database of this engine ({path.name}{ending} is missing). {remedy}")
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(file for file in path.parent.glob(f"{path.name}*") if file.is_file()):
        with opened(file, unpack=False) as data:
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            digest.update(data.read(DIGEST_BYTES))
            data.seek(max(size - DIGEST_BYTES, 0))
            digest.update(data.read(DIGEST_BYTES))
    return Survey(digest.hexdigest())


def _extract_rows(text: str, query: SearchQuery, max_rows: int | None, program: str) -> str | UserError:
    """Return the rows below the query in a program's A3M. Headers of MMseqs2 are converted to ranges as in HMMER."""
    try:
        parse_alignment(text, program, query.sequence)
    except UserError as error:
        return error
    rows = []
    for record in text.lstrip(">").strip("\n").split("\n>")[1:max_rows]:
        header, _, letters = record.partition("\n")
        # MMseqs2: name, bits, identity, E-value, start, end and length in the query, start, end and length in the
        # target.
        fields = header.split("\t")
        if len(fields) == 10:
            header = f"{fields[0]}/{int(fields[7]) + 1}-{int(fields[8]) + 1}"
        rows.append(f">{header}\n{letters.translate({10: None})}\n")
    return "".join(rows)
