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
        if shared:
            out.append(Finding("cards", "shared", "measured", shared))
        return out + self._recipes(bool(shared)) + self._peers(bool(shared))

    def _recipes(self, shared: bool) -> list[Finding]:
        out, ways = list[Finding](), dict[Path, Found]()
        wanted = self.recipes or tuple(presets())
        refused = {p: why for p in wanted if (why := recipes.refused(p, self.runner.size))}
        possible = tuple(p for p in wanted if p not in refused)
        for way in GO:
            if self.runner.size == 1:
                out.append(Finding(f"recipes over {WAYS[way]}", "all", "left out", ALONE))
                continue
            spec = CheckSpec("recipes", possible, tuple(range(self.runner.size)), way, shared=_apart(way, shared))
            ways[way] = self._carry_out(spec)
            out += _merged(ways[way])
        for preset in possible if ways else ():
            fine: dict[Path, dict[int, Finding]] = {
                way: by[preset] for way, by in ways.items() if _all_passed(by.get(preset, {}))
            }
            if len(fine) > 1:
                out.append(recipes.compared(preset, fine))
        return out + [Finding("mean losses", p, "left out", why) for p, why in refused.items()]

    def _peers(self, shared: bool) -> list[Finding]:
        out, everyone = list[Finding](), tuple(range(self.runner.size))
        for way in GO[1:]:
            if self.runner.size == 1:
                out.append(Finding(f"a killed peer over {WAYS[way]}", "all", "left out", ALONE))
                continue
            for recipe in KILLED:  # in separate processes: one of them will end
                out += _merged(
                    self._carry_out(CheckSpec("peers", (recipe,), everyone, way, shared=_apart(way, shared)))
                )
        return [replace(f, check=f.check.replace("peers", "a killed peer")) for f in out]

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


def _apart(way: Path, shared: bool) -> bool:
    return shared and way == "nccl"


def _merged(found: Mapping[str, Mapping[int, Finding]]) -> list[Finding]:
    return [merged(dict(by_rank)) for by_rank in found.values()]


def _all_passed(by_rank: Mapping[int, Finding]) -> bool:
    return bool(by_rank) and all(f.outcome == "passed" for f in by_rank.values())
