"""gossamer claims: what papers claim, and what was found."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gossamer.bench.claims import ClaimRecord, PaperClaim, begun, confirm, empty, find, hash_of, names, quick, run_claim
from gossamer.bench.claims.evidence import ClaimRun
from gossamer.bench.claims.pages import counts, write_pages
from gossamer.bench.claims.record import JudgedStatement
from gossamer.bench.claims.sources import is_judged_code
from gossamer.bench.claims.verdict import ORDER
from gossamer.bench.cli import progress
from gossamer.bench.cli.console import console
from gossamer.bench.cli.errors import FailedError, InputError
from gossamer.bench.cli.output import hold, made_folder, writing

IN_A_CHECKOUT, ELSEWHERE = Path("docs/claims/records"), Path("runs/claims")


def claims(
    name: Annotated[str | None, typer.Argument(help="The claim to run; without one, all are listed.")] = None,
    short: Annotated[bool, typer.Option("--quick", help="One seed, a fifth of the steps, no verdict.")] = False,
    records: Annotated[
        Path | None,
        typer.Option(help="Folder of the records. [default: docs/claims/records in a checkout, else runs/claims]"),
    ] = None,
    anew: Annotated[
        bool,
        typer.Option(
            "--anew", help="Where the plan or the code has changed: keep the verdicts as earlier ones, run it anew."
        ),
    ] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--confirm", help="Make the first seed's runs again: where they are the same, a stale verdict stands again."
        ),
    ] = False,
    pages: Annotated[Path | None, typer.Option(help="Write the pages of all records into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what papers claim and what was found, or try one claim: by the rule that was fixed before it was run.

    Two processes of one thread run it. Every run that is finished is kept, so the same command goes on where it was ended;
    a claim that has its verdicts is not run again.
    """
    folder = records or (IN_A_CHECKOUT if IN_A_CHECKOUT.is_dir() else ELSEWHERE)
    if short + anew + again > 1:
        raise InputError("--quick, --anew and --confirm run other things: give one of them")
    if pages is not None:
        if name is not None or short or anew or again or as_json:
            raise InputError(
                "--pages writes the pages of all records, and runs no claim: give only --records beside it"
            )
        _write_pages(folder, pages)
    elif name is None and (short or anew or again):
        raise InputError("--quick, --anew and --confirm are of one claim: name it; 'gossamer claims' lists them")
    elif name is None:
        _list(folder, as_json)
    elif again:
        _confirm(find(name), folder / f"{name}.json", as_json)
    elif short:
        runs = quick(find(name), lambda run, left: None if as_json else _told(run, left))
        if as_json:
            progress.json_line({"claim": name, "runs": len(runs), "seconds": sum(run.seconds for run in runs)})
    else:
        _run(find(name), folder, anew, as_json)


def _run(claim: PaperClaim, folder: Path, anew: bool, as_json: bool) -> None:
    path = made_folder(folder, "--records") / f"{claim.name}.json"
    hold(path, "--records")
    known = begun(claim, path, anew)
    run_claim(claim, known, lambda record: _keep(record, path), lambda run, left: None if as_json else _told(run, left))
    if as_json:
        print(json.dumps(_facts(known, _changed(claim, known)), indent=1))
        return
    out = console()
    verdicts = known.verdicts(_changed(claim, known))
    for row, verdict in zip(known.statements, verdicts, strict=True):
        out.print(f"{row.key}. {row.says}", markup=False)
        out.print(f"   {verdict} (expected: {row.expected})  {row.found}", markup=False)
    if "stale" in verdicts:
        out.print("\nstale: its code has changed since; --confirm makes the first seed's runs again", markup=False)
    out.print(f"\nrecord: {path}", markup=False, soft_wrap=True)


def _confirm(claim: PaperClaim, path: Path, as_json: bool) -> None:
    hold(path, "--records")
    known = begun(claim, path)
    if not known.done:
        raise InputError(f"{claim.name} has no verdicts that could be confirmed; run 'gossamer claims {claim.name}'")
    others = confirm(claim, known, _told)
    if others:
        raise FailedError(
            f"{claim.name} stays stale, since these runs come out otherwise now: {', '.join(others)}; "
            "with --anew its verdicts are kept as earlier ones and it is run again"
        )
    _keep(known, path)
    if as_json:
        print(json.dumps(_facts(known, _changed(claim, known)), indent=1))
        return
    console().print(
        f"{claim.name}: all runs of seed {min(known.seeds)} came out the same; the verdicts stand", markup=False
    )


def _keep(known: ClaimRecord, path: Path) -> None:
    with writing(path, "give another folder with --records"):
        known.write(path)


def _told(run: ClaimRun, left: int) -> None:
    what = f"trial {run.number}" if run.stage == "tuning" else "again" if run.stage == "final" else f"seed {run.seed}"
    ending = f"  {run.error}" if run.error else ""
    progress.said(f"{run.study} {run.case}: {what}, {run.seconds:.1f} s, {left} under way or waiting{ending}")


def _known(folder: Path) -> list[tuple[PaperClaim, ClaimRecord]]:
    """Every claim with its record; an empty one where it has none."""
    out = list[tuple[PaperClaim, ClaimRecord]]()
    for name in names():
        claim, path = find(name), folder / f"{name}.json"
        try:
            out.append((claim, ClaimRecord.read(path) if path.exists() else empty(claim)))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is no record of a claim: {error}; move it away") from None
    return out


def _changed(claim: PaperClaim, known: ClaimRecord) -> bool:
    """Whether the plan or the code is another than that which was judged."""
    return known.plan != hash_of(claim) or not is_judged_code(claim, known.sources)


def _list(folder: Path, as_json: bool) -> None:
    found = [(known, _changed(claim, known)) for claim, known in _known(folder)]
    if as_json:
        print(json.dumps([_facts(known, changed) for known, changed in found], indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for head in ("claim", "statement", "verdict", "expected", "minutes"):
        table.add_column(head, no_wrap=head != "statement")
    for known, changed in found:
        for row, verdict in zip(known.statements, known.verdicts(changed), strict=True):
            table.add_row(known.claim, f"{row.key}. {row.says}", verdict, row.expected, _minutes(known, row))
    console().print(table)
    console().print(f"\n{counts([known for known, _ in found])}", markup=False)
    if not any(known.done for known, _ in found):
        where = f"No verdicts in {folder}: those that were found are in {IN_A_CHECKOUT} of gossamer's sources."
        console().print(where, markup=False)


def _minutes(known: ClaimRecord, row: JudgedStatement) -> str:
    return f"{known.wall / 60:.1f}" if row.verdict in ORDER else ""


def _facts(known: ClaimRecord, changed: bool) -> dict[str, object]:
    rows = zip(known.statements, known.verdicts(changed), strict=True)
    statements = [{**vars(row), "verdict": verdict} for row, verdict in rows]
    return {"claim": known.claim, "done": known.done, "minutes": known.wall / 60, "statements": statements}


def _write_pages(folder: Path, pages: Path) -> None:
    with writing(made_folder(pages, "--pages"), "give another folder with --pages"):
        written = write_pages([known for _, known in _known(folder)], pages)
    console().print(f"{len(written)} files in {pages}", markup=False)
