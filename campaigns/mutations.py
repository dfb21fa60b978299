"""Mistakes that training would not survive unharmed: `python -m campaigns.mutations [NAME...]`, from the repository's root.

Each changes one line of a copy of the source, so that what it names first would be wrong; the test behind it must fail then.
Prints which did not, and which could not be made because the source reads otherwise now.
"""

import sys

from campaigns.mutating import Mutation, main

CODECS, MEMORIES, NEW_RUN, NOT_FINITE = (
    f"tests/laws/test_{name}.py" for name in ("codec_laws", "memory_laws", "laws_resume", "laws_non_finite")
)
BOOKS = "test_with_error_feedback_the_sum_of_means_and_what_is_kept_is_the_sum_of_gradients"
FIRST, SLOWMO, OVERLAP = (f"tests/schedules/test_{name}.py" for name in ("backup_workers", "slowmo", "overlap"))
ACCORDION, SUMS = "tests/controllers/test_accordion.py", "tests/controllers/test_sums.py"
NODES, GROUPS = "tests/exchanges/test_nodes.py", "tests/core/test_groups.py"
MEAN_OF_ALL = "test_it_is_the_mean_of_all_also_where_the_last_node_is_smaller"
COUNTING, RECIPE, REPORT = (
    "tests/planning/test_counting.py",
    "tests/recipe/test_recipe.py",
    "tests/bench/report/test_numbers.py",
)


MUTATIONS = (
    # the worker, whatever the recipe
    Mutation("engine: spoilt means change memories", "runtime/averaging.py", "PendingCommit(flight.drafts if self.finite else [], renewed", "PendingCommit(flight.drafts, renewed", f"{NOT_FINITE}::test_a_lost_model_costs_one_round_and_no_memory[topk(ratio=0.1) + slowmo(3, by_lr=False)]"),
    Mutation("engine: a spoilt round is taken", "runtime/averaging.py", "flight.lost = not self.finite", "flight.lost = False", f"{NOT_FINITE}::test_a_lost_model_costs_one_round_and_no_memory[slowmo(3)]"),
    Mutation("engine: channels in any order", "runtime/buckets.py", "finished.sort(key=lambda names: position[names[-1]])", "pass", "tests/runtime/test_buckets.py::test_channels_go_in_the_order_in_which_backward_fills_them"),
    Mutation("engine: rates stay multiplied", "runtime/update_step.py", "for group, (users, _) in zip(optimizer.param_groups, self._rates.pop(optimizer, [])):\n            group", "for group, (users, _) in zip(optimizer.param_groups, self._rates.pop(optimizer, [])):\n            dict(group)", f"{ACCORDION}::test_the_rate_grows_at_the_same_step_as_the_batch"),
    Mutation("engine: momenta of strangers are averaged", "runtime/optimizer_state.py", "return largest == -smallest", "return True", f"{SLOWMO}::test_a_rank_without_buffers_yet_does_not_stop_the_others"),
    # how a block is written
    Mutation("codec: a sum for a mean", "codecs/ternary.py", "self.levels * context.size)", "self.levels)", "tests/codecs/test_ternary.py::test_t3_integers_in_lanes_are_the_float_computation_bit_for_bit"),
    Mutation("codec: a maximum swallows NaN", "codecs/ternary.py", "own = torch.where(own.isfinite(), own, torch.inf)", "own = own.nan_to_num(0.0)", f"{CODECS}::test_one_rank_s_number_that_is_not_finite_is_seen_by_all"),
    Mutation("codec: too small a variance is stated", "codecs/qsgd.py", "return ((1 + (n - 1) / s**2) ** 0.5 - 1) / 2", "return ((1 + (n - 1) / s**2) ** 0.5 - 1) / 4", "tests/codecs/test_qsgd.py::test_omega_is_the_least_upper_bound"),
    Mutation("codec: an element too many", "codecs/topk.py", "ratio * n * (1 - 1e-12))", "ratio * n)", "tests/codecs/test_topk.py::test_a_share_that_is_a_whole_number_of_elements_is_that_number"),
    Mutation("codec: no warm start", "codecs/powersgd.py", "torch.where(tops != 0, q, torch.stack(before))", "torch.stack(before)", "tests/codecs/test_powersgd.py::test_a_warm_start_on_a_fixed_matrix_converges_to_the_best_approximation"),
    Mutation("codec: all ranks have one rank's dice", "core/rng.py", "return self._key(name, self.rank)", "return self._key(name, 0)", f"{CODECS}::test_every_rank_step_and_seed_has_its_own_dice_or_there_are_none"),
    # who agrees with whom
    Mutation("exchange: a memory is not heard", "exchanges/scatter.py", "return float(self.answers.needs_feedback) if context.feedback is None else context.feedback", "return float(self.answers.needs_feedback)", "tests/exchanges/test_averages.py::test_a_memory_says_how_much_of_the_second_encoding_is_owed"),
    Mutation("exchange: what the answer loses is owed twice", "exchanges/scatter.py", "mean.layout, error, -rate)", "mean.layout, error, -2 * rate)", f"{MEMORIES}::{BOOKS}[3-scatter(topk()) + error_feedback()]"),
    Mutation("exchange: nothing is told of one's own message", "exchanges/gather.py", "codec.accumulate(wire, layout, into, weight)", "codec.accumulate(wire, layout, into, 0 * weight)", f"{MEMORIES}::{BOOKS}[3-gather(topk()) + error_feedback()]"),
    # what is kept
    Mutation("memory: half is forgotten", "memories/error_feedback.py", "result.add_sent(pending, -1.0)", "result.add_sent(pending, -0.5)", f"{MEMORIES}::{BOOKS}[3-gather(topk()) + error_feedback()]"),
    Mutation("memory: rates the wrong way round", "memories/error_feedback.py", "self.decay * units.now / units.before", "self.decay * units.before / units.now", "tests/memories/test_error_feedback.py::test_in_units_of_the_update_it_is_the_form_of_the_theory"),
    Mutation("memory: the common gradient runs ahead", "memories/learning.py", "torch.add(common, mean, alpha=rate", "torch.add(common, mean, alpha=1.0", "tests/memories/test_diana.py::test_the_common_gradient_is_the_mean_of_the_learned_ones_at_every_step"),
    # who carries it
    Mutation("fabric: what is sent last is read first", "fabrics/sim_mail.py", "arrival, wire = self._wires[route].popleft()", "arrival, wire = self._wires[route].pop()", "tests/fabrics/test_sim.py::test_messages_of_one_pair_arrive_in_the_order_of_sending"),
    Mutation("fabric: a gather among one more", "costs/crossing.py", "_ring(wire.numel(), (count - 1) * wire.numel()", "_ring(wire.numel(), count * wire.numel()", "tests/exchanges/test_averages.py::test_gathered_bytes_grow_with_the_world"),
    # what a file holds
    Mutation("checkpoint: a sum where the mean is kept", "checkpoints/state.py", '(total / len(own) if policy == "mean" else total)', "total", f"{NEW_RUN}::test_a_new_world_keeps_the_mean_residual_and_everything_owed"),
    Mutation("checkpoint: what is on its way is left out", "checkpoints/state.py", 'out[i]["schedule"] = {"pending": mean}', "pass", f"{OVERLAP}::test_saving_with_a_message_in_flight_changes_no_bit"),
    # what it costs, says and shows
    Mutation("counting: a warm-up counts", "planning/dry_run.py", "return warmup + 1, warmup + every", "return 1, every", f"{COUNTING}::test_only_whole_rounds_after_the_warm_up_count"),
    Mutation("recipe: a preset's rules come first", "recipe.py", "rules=(*rules, *base.rules)", "rules=(*base.rules, *rules)", f"{RECIPE}::test_rules_given_come_before_a_preset_s_own"),
    Mutation("report: the first step counts", "bench/report/study.py", "return (last.seconds - first.seconds) / max(last.step - first.step, 1)", "return last.seconds / last.step", f"{REPORT}::test_rows_are_means_and_ratios"),
    # schedules
    Mutation("schedule: slow momentum at the old rate", "schedules/rounds.py", "alpha=beta * ratio)", "alpha=beta)", f"{SLOWMO}::test_slowmo_is_its_formula_in_both_forms"),
    Mutation("schedule: a warm-up ends a step early", "schedules/local_sgd.py", "1 if loop.step <= self.warmup else", "1 if loop.step < self.warmup else", f"{SLOWMO}::test_warm_up_averages_at_every_step"),
    Mutation("schedule: the pull is too weak", "schedules/overlap_local_sgd.py", "torch.lerp(x, a, self.alpha, out=x)", "torch.lerp(x, a, 1 - self.alpha, out=x)", f"{OVERLAP}::test_it_is_the_formula_of_the_paper"),
    Mutation("schedule: the threshold knows no momentum", "schedules/every_step.py", "gain * (lr * self.rate) * self.l1 for", "(lr * self.rate) * self.l1 for", "tests/schedules/test_penalty.py::test_the_optimum_of_lasso_and_ridge_is_found_with_momentum"),
    Mutation("schedule: a mean over those who are late too", "schedules/quorum.py", "result.mean.mul_(loop.ranks.size / len(accepted))", "result.mean", f"{FIRST}::test_the_mean_is_over_the_accepted_and_nothing_else"),
    Mutation("schedule: all speak of the rate at once", "schedules/quorum.py", "numbers.clone() if loop.ranks.rank == accepted[0] else", "numbers.clone() if loop.ranks.rank >= 0 else", f"{FIRST}::test_a_late_rank_takes_missed_updates_with_the_rates_of_their_steps"),
    Mutation("schedule: messages are absorbed at once", "schedules/gossip.py", "(step + self.overlap) % self.every", "step % self.every", "tests/laws/test_laws_replicas.py::test_a_round_whose_messages_travel_ends_just_before_they_land"),
    # controllers
    Mutation("controller: at the threshold it is mild", "controllers/regimes.py", "abs(old - now) / old >= threshold", "abs(old - now) / old > threshold", f"{ACCORDION}::test_a_parameter_is_critical_exactly_at_the_drop"),
    Mutation("controller: what it counts is scaled", "runtime/controller_runner.py", "gradient / scale if scale != 1 else gradient", "gradient", f"{SUMS}::test_they_are_free_of_the_loss_scale"),
    Mutation("controller: what is owed is left behind", "runtime/succession.py", "if memory != bucket.memory or type(exchange) is not type(bucket.exchange):", "if memory != bucket.memory:", "tests/runtime/test_knobs.py::test_nothing_is_lost_as_it_turns"),
    # updates
    Mutation("update: a late rank descends along the mean", "runtime/update_step.py", "drafts = self.redirect()", "drafts = []", "tests/updates/test_signs.py::test_late_ranks_take_the_directions_that_they_missed"),
    # groups and nodes
    Mutation("groups: the inner one counts as all do", "core/groups.py", "tuple(ranks[i] for i in verb.among)", "verb.among", f"{GROUPS}::test_a_request_of_nobody_in_particular_is_asked_of_the_group_and_groups_nest"),
    Mutation("groups: what they start they ask everybody", "core/groups.py", "return replace(verb, program=within(program, ranks))", "return verb", f"{GROUPS}::test_what_is_started_runs_among_them_too_also_when_it_starts_something"),
    Mutation("nodes: a small one weighs as much", "exchanges/nodes.py", "weight = len(node.ranks) * len(node.leaders) / context.size", "weight = 1.0", f"{NODES}::{MEAN_OF_ALL}"),
    Mutation("nodes: a rank's debt counts once", "exchanges/nodes.py", "alpha=share * context.size)", "alpha=share)", f"{MEMORIES}::{BOOKS}[8-nodes(nodes(scatter(topk(ratio=0.3)), 2), 2, inside=scatter(bf16())) + error_feedback()]"),
    # terms and units
    Mutation("terms: what is needed is not asked for", "core/constraints.py", "bool(term.traits & have) != term.wanted", "bool(term.traits & have) > term.wanted", "tests/recipe/test_refusals.py::test_it_is_refused_with_the_reason_and_the_fix"),
    Mutation("units: memories keep the old loss scale", "runtime/loss_scale.py", "{key: tensor * factor for key, tensor in old.items()}", "old", "tests/runtime/test_loss_scale.py::test_training_is_the_same_under_any_scale"),
    Mutation("units: a scale that is none is followed", "runtime/loss_scale.py", "or not isfinite(scale) or scale <= 0", "", "tests/runtime/test_loss_scale.py::test_a_scale_that_is_no_scale_spoils_no_memory"),
    # chunks of rows, and neighbours
    Mutation("rows: an edge in the midst of one", "core/bucket.py", "(place - s.offset + s.row // 2) // s.row * s.row", "place - s.offset", "tests/core/test_bucket.py::test_chunks_of_a_matrix_are_matrices_where_rows_are_short"),
    Mutation("gossip: a neighbour's weight is left out", "mixers/push_sum.py", "w = w + self._weight(rest, x.dtype, state)", "w = w", "tests/mixers/test_push_sum.py::test_mixing_conserves_mass_and_weight_in_flight_included"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(MUTATIONS, sys.argv[1:]))
