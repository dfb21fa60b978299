"""Run all GPU checks: which checks, on which ranks, in which order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gossamer.bench.compare.gpu import devices, recipes, samples, streams
from gossamer.bench.compare.gpu.check_spec import WAYS, CheckSpec, Path, Sizes
from gossamer.bench.compare.gpu.findings import Finding, merged
from gossamer.bench.compare.gpu.launch import Runner
from gossamer.bench.compare.gpu.results import results_of
from gossamer.recipes import presets

Found = dict[str, dict[int, Finding]]  # by subject, then by rank
CARD, ALONE = ("card", "triton"), "one rank alone has no peer"
GO: tuple[Path, ...] = ("cpu", "nccl", "staged")  # the CPU first: other paths are compared with it
KILLED = ("allreduce", "sgp")  # one recipe with collectives, one with point-to-point messages


@dataclass
class Examination:
    """Runs every check once; a failure is a finding and does not stop the other checks."""

    runner: Runner
    sizes: Sizes = field(default_factory=Sizes)
    say: Callable[[str], None] = print
    recipes: Sequence[str] = ()  # presets; none: all
    _orders: int = 0

    def run(self) -> list[Finding]:
        everyone = tuple(range(self.runner.size))
        found = self._carry_out(CheckSpec("cards", CARD, everyone))
        places = {rank: f.numbers.get("place", "") for rank, f in found["card"].items()}
        shared = devices.shared(places)
        owners = tuple(r for r in everyone if not places[r] or r == next(q for q in everyone if places[q] == places[r]))
        out = [replace(f, subject=f"rank {rank}") for rank, f in found["card"].items()] + _merged(
            {"triton": found["triton"]}
        )
        out += _merged(self._carry_out(CheckSpec("kernels", tuple(samples.names()), owners)))
        out += _merged(self._carry_out(CheckSpec("streams", tuple(streams.SUBJECTS), owners)))
        return out + self._recipes(shared) + self._peers(shared)

    def _recipes(self, shared: str) -> list[Finding]:
        out, ways = list[Finding](), dict[Path, Found]()
        wanted = self.recipes or tuple(presets())
        refused = {p: why for p in wanted if (why := recipes.refused(p))}
        possible = tuple(p for p in wanted if recipes.ranks_needed(p) <= self.runner.size and p not in refused)
        for way in GO:
            why = self._why_not(way, shared)
            if why:
                out.append(Finding(f"recipes over {WAYS[way]}", "all", "left out", why))
                continue
            ways[way] = self._carry_out(CheckSpec("recipes", possible, tuple(range(self.runner.size)), way))
            out += _merged(ways[way])
        for preset in possible if ways else ():
            fine: dict[Path, dict[int, Finding]] = {
                way: by[preset] for way, by in ways.items() if _all_passed(by.get(preset, {}))
            }
            if len(fine) > 1:
                out.append(recipes.compared(preset, fine))
        few = f"it needs more than {self.runner.size} ranks"
        return out + [Finding("mean losses", p, "left out", refused.get(p, few)) for p in wanted if p not in possible]

    def _peers(self, shared: str) -> list[Finding]:
        out, everyone = list[Finding](), tuple(range(self.runner.size))
        for way in GO[1:]:
            if why := self._why_not(way, shared):
                out.append(Finding(f"a killed peer over {WAYS[way]}", "all", "left out", why))
                continue
            for recipe in KILLED:  # in separate processes: one of them will end
                out += _merged(self._carry_out(CheckSpec("peers", (recipe,), everyone, way)))
        return [replace(f, check=f.check.replace("peers", "a killed peer")) for f in out]

    def _why_not(self, way: Path, shared: str) -> str:
        if self.runner.size == 1:
            return ALONE
        return shared if way == "nccl" else ""

    def _carry_out(self, spec: CheckSpec) -> Found:
        """Run all subjects of a check, in as many launches as needed."""
        found, spec = Found(), replace(spec, sizes=self.sizes)
        while spec.subjects:
            self._orders += 1
            self.say(f"{spec.title}: {', '.join(spec.subjects)}")
            spec = replace(spec, number=self._orders)
            heard = results_of(spec, self.runner.run(spec))
            found |= heard.findings
            spec = replace(spec, subjects=heard.left)
        return found


def _merged(found: Mapping[str, Mapping[int, Finding]]) -> list[Finding]:
    return [merged(dict(by_rank)) for by_rank in found.values()]


def _all_passed(by_rank: Mapping[int, Finding]) -> bool:
    return bool(by_rank) and all(f.outcome == "passed" for f in by_rank.values())
