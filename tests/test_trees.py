"""fast/trees.py and fast/head.py: what is shared and chunked changes neither log-probs nor gradient."""
import copy
from functools import partial

import pytest
import torch
import transformers
from test_flow_grpo import SIZE, compare_with_the_oracle, family, fast, in_memory, learn, one_by_one, tiny
from transformers import AutoModelForCausalLM

import flow_grpo
from cli.flags import HOPS, TOY
from fast import head, logps, trees
from flow_grpo import Action
from models.loading import load_engine

T = 0.7
HYBRID = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, head_dim=16,
              linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"])
# Rows must not be trees where there are windows, ALiBi or a recurrent state.
ALONE = dict(
    Mistral=dict(sliding_window=4), Gemma2=dict(head_dim=8), Gemma3Text=dict(head_dim=8, sliding_window=4),
    Bloom={}, Mamba={}, Qwen3_5Text=HYBRID,
    GPTNeo=dict(attention_types=[[["global", "local"], 1]], num_layers=2))
TREES = dict(Qwen2={}, Llama={}, GPT2={}, Granite=dict(logits_scaling=3.0), Phi3={})
# What rounding in float32 may change in a log-prob that is computed in another order. Log-probs of these
# models are near 10: some 30 operations that each round by 6e-8 of that make 2e-5. With AVX2 6e-6 was seen.
# A wrong mask, position or temperature changes log-probs by 0.1 and more.
ROUNDING = 1e-4
WIDE = dict(initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def made(name, **changes):
    torch.manual_seed(0)
    size = {**SIZE, **WIDE, **changes}
    if name == "Mamba":
        size = {key: size[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size", *WIDE)}
    return AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**size)).eval()


def rows_of(model):
    return [row for batch, _ in trees.micro_batches(model, family()[0], 99) for row in batch.rows]


def score(model, budget=10_000):
    """The log-probs of the actions of family(), in their order, computed in micro-batches."""
    actions, found, scoring = family()[0], {}, fast(model)
    for batch, _ in scoring[1](actions, budget):
        parts = scoring[0](model, batch, T).split([len(a.ids) for a in batch])
        found |= dict(zip(map(id, batch), parts))
    return torch.cat([found[id(a)] for a in actions])


# ---- trees -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("budget, checkpointing", [(1, False), (12, True), (30, False), (10_000, True)])
def test_shared_prompts_change_neither_the_loss_nor_the_gradient(budget, checkpointing):
    change = (lambda model: model.activation_checkpointing_enable()) if checkpointing else None
    compare_with_the_oracle(flow_grpo, budget=budget, batch=family(), change=change)


@pytest.mark.parametrize("name, attention", [*((name, "sdpa") for name in TREES), ("Qwen2", "eager")])
def test_a_tree_scores_as_its_sequences_alone_do(name, attention):
    model = made(name)
    model.set_attn_implementation(attention)
    assert trees.shares(model) and max(map(len, rows_of(model))) > 1
    expected = torch.stack([logp for a in family()[0] for logp in one_by_one(model, a)])
    found = score(model)
    plain = flow_grpo.token_logps(model, family()[0], T)
    assert max((found - expected).abs().max(), (plain - expected).abs().max()) < ROUNDING
    found, expected = (torch.autograd.grad(x.sum(), list(model.parameters())) for x in (found, expected))
    assert all((x - y).abs().max() <= 1e-4 * y.abs().max() for x, y in zip(found, expected))


@pytest.mark.parametrize("name, dtype, error", [
    *((name, torch.float32, ROUNDING) for name in ALONE), ("Gemma2", torch.bfloat16, 0.6)])
def test_models_with_windows_alibi_or_a_state_get_a_row_for_each_sequence_and_are_right(name, dtype, error):
    model = made(name, **ALONE[name]).to(dtype)
    assert not trees.shares(model) and max(map(len, rows_of(model))) == 1
    expected = torch.stack([logp for a in family()[0] for logp in one_by_one(model, a)])
    plain = flow_grpo.token_logps(model, family()[0], T)
    assert max((score(model) - expected).abs().max(), (plain - expected).abs().max()) < error


def test_the_probe_alone_finds_out_that_a_mask_is_not_obeyed():
    for name in ("Bloom", "Mamba", "Qwen3_5Text"):
        assert not trees.tree_is_right(made(name, **ALONE[name]))
    assert trees.tree_is_right(made("Qwen2"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_half_precision_trees_differ_from_rows_by_rounding_only(dtype):
    model = made("Qwen2", initializer_range=0.1).to(dtype)
    assert trees.shares(model)
    expected = torch.stack([logp for a in family()[0] for logp in one_by_one(model.float(), a)])
    with torch.no_grad():
        found = score(model.to(dtype))
    # Some 30 operations between a token and its log-prob round by up to eps / 2 each, of numbers near 1.
    # Machines differ in the order of sums: 0.5 to 2.7 eps were seen. A wrong mask is 40 eps off in bfloat16.
    assert (found - expected).abs().mean() < 15 * torch.finfo(dtype).eps


def test_a_node_sees_its_own_sequence_and_nothing_else():
    row = [Action([1, 2], [3, 4, 0], 0), Action([1, 2], [3, 5, 0], 0), Action([1], [6, 0], 0)]
    ids, depths, ends, before = trees.tree(row)
    assert (ids, depths, ends) == ([1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 3, 1], [6, 5, 5, 4, 5, 6])
    assert before == [[1, 2, 3], [1, 2, 4], [0, 5]]
    sees = trees.mask(torch.tensor([ends + [0]]), torch.float32)[0, 0] == 0        # and a place of padding
    assert [[j for j in range(7) if line[j]] for line in sees.tolist()] == [
        [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 5], [6]]


def test_equal_completions_of_a_prompt_are_computed_once():
    model, copies = tiny(), [Action([1, 2, 3], [4, 5], rollout) for rollout in range(4)]
    (batch, slots), = trees.micro_batches(model, copies, 100)
    x, keep, _, y, pair, _ = trees.layout(batch, model)
    assert slots == x.numel() == 4 and keep.sum() == len(y) == 2 and pair.tolist() == [0, 1] * 4
    report, _ = learn(model, copies, [1.0, 1.0, 1.0, -1.0])
    assert report["tokens"] == 8


def test_a_row_ends_where_attention_would_cost_more_than_sharing_saves():
    group = [Action(list(range(64)), [100 + i] * 65, i) for i in range(64)]
    rows = trees.share_rows(group, 10**6, width=32)
    assert sorted(a.rollout for _, row in rows for a in row) == list(range(64))
    assert 1 < len(rows) < 64 and len(trees.share_rows(group, 10**6, width=4096)) < len(rows)
    assert all(nodes <= 300 for nodes, _ in trees.share_rows(group, 300, width=4096))


def test_padding_is_at_most_a_tenth_though_the_budget_allows_more_and_none_is_lost():
    actions = [Action([i, *range(40 + 9 * i)], [1], i) for i in range(60)]
    for budget in (1, 2000, 10**6):
        micro_batches = trees.micro_batches(tiny(), actions, budget)
        assert sorted(a.rollout for batch, _ in micro_batches for a in batch) == list(range(60))
        for batch, slots in micro_batches:
            assert len(batch.rows) == 1 or slots <= budget
            assert batch.nodes >= 0.9 * slots or slots <= trees.SMALL


def test_a_row_that_does_not_fit_is_cut_down_to_single_sequences():
    tried = []

    def work(batch):
        tried.append(len(batch))
        if len(batch) > 1:
            raise torch.OutOfMemoryError("a test says so")
        return batch[0].rollout
    copies = [Action([1, 2, 3], [4, 5], n) for n in range(5)]
    cut = partial(trees.micro_batches, tiny())
    with pytest.warns(UserWarning, match="Out of memory"):
        rollouts, _, _ = in_memory(work, copies, lambda a: 5, 100, cut=cut)
    assert sorted(rollouts) == list(range(5)) and tried[0] == 5


# ---- mini-batches, flat groups -----------------------------------------------------------------------------

def test_a_mini_batch_divides_a_group_only_at_its_border():
    groups = [3, 3, 3, 3, 0, 0, 7, 7, 7, 7]
    for seed in range(5):
        parts = flow_grpo.split_rollouts(groups, 2, seed)
        assert [len(part) for part in parts] == [5, 5] and sorted(sum(parts, [])) == list(range(10))
        divided = [group for group in {*groups} if all(group in [groups[i] for i in part] for part in parts)]
        assert len(divided) <= 1
    assert len({str(flow_grpo.split_rollouts(groups, 2, seed)) for seed in range(5)}) > 1


def test_the_ratio_is_exactly_one_at_first_with_trees_too():
    actions, rewards, groups = family()
    A, _ = flow_grpo.advantages(rewards, groups)
    one, _ = learn(tiny(), actions, A, groups=groups, reference=tiny(1))
    three, _ = learn(tiny(), actions, A, groups=groups, minibatches=3, lr=1.0)
    assert one["ratio_min"] == one["ratio_max"] == 1
    assert three["ratio_max"] > 1


def test_a_flat_group_has_no_old_log_probs_and_with_beta_its_kl_alone():
    scored = []
    actions, rewards, groups = family()
    A, _ = flow_grpo.advantages(rewards, groups)                    # rollouts 7 and 8 are flat
    for beta in (0, 0.1):
        model, reference = tiny(), tiny(1)
        scored_fast, cut = fast(model, reference)

        def token_logps(model, actions, temperature):
            scored.append((model, {a.rollout for a in actions}, torch.is_grad_enabled()))
            return scored_fast(model, actions, temperature)
        scored.clear()
        learn(model, actions, A, reference, groups=groups, minibatches=3, beta=beta, way=(token_logps, cut))
        union = lambda rows: {rollout for _, rollouts, _ in rows for rollout in rollouts}
        assert union(row for row in scored if row[2]) == set(range(9 if beta else 7))
        assert union(row for row in scored if row[0] is reference) == (set(range(9)) if beta else set())
        assert not union(row for row in scored if row[0] is model and not row[2]) & {7, 8}


def test_in_half_precision_a_policy_that_did_not_change_has_ratio_1_also_beside_a_flat_group():
    actions, rewards, _ = family()
    for a in actions:                                           # all groups, the flat one too, begin alike
        a.prompt_ids = [50, 51, 52, *a.prompt_ids]
    A, _ = flow_grpo.advantages(rewards, [0, 0, 0, 0, 1, 1, 1, 2, 2])
    model = made("Qwen2").bfloat16()
    report, _ = learn(model, actions, A, made("Llama").bfloat16(), lr=0.0, minibatches=3, beta=0.1)
    assert report["ratio_min"] == report["ratio_max"] == 1


# ---- the head ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_lean_log_probs_are_the_definitions_in_value_and_gradient(dtype, bias, monkeypatch):
    monkeypatch.setattr(head, "CHUNK", 3 * 64)
    layer, y = torch.nn.Linear(16, 64, bias=bias), torch.randint(64, (20,))
    layer, states, upstream = layer.to(dtype), torch.randn(20, 16).to(dtype), torch.randn(20)
    found = []
    for score in (lambda s: head.log_probs(flow_grpo.log_probs, s, y, T, layer),
                  lambda s: flow_grpo.log_probs(layer(s), y, T)):
        inputs = states.clone().requires_grad_()
        logps = score(inputs)
        found.append((logps, *torch.autograd.grad(logps, [inputs, *layer.parameters()], upstream)))
    for lean, defined in zip(*found):
        assert (lean - defined).float().norm() <= 12 * torch.finfo(dtype).eps * defined.float().norm()
        assert lean.dtype == defined.dtype


def test_a_frozen_head_gets_no_gradient_and_its_states_do(monkeypatch):
    monkeypatch.setattr(head, "CHUNK", 64)
    layer, states = torch.nn.Linear(16, 64).requires_grad_(False), torch.randn(5, 16, requires_grad=True)
    head.log_probs(flow_grpo.log_probs, states, torch.arange(5), T, layer).sum().backward()
    assert layer.weight.grad is None and states.grad.norm() > 0.1


@pytest.mark.parametrize("name, changes, plain", [
    ("Qwen2", {}, True), ("Llama", {}, True), ("Granite", dict(logits_scaling=3.0), False),
    ("Cohere", dict(logit_scale=0.3), False),
    ("Gemma2", dict(head_dim=8, final_logit_softcapping=5.0), False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_is_plain_if_nothing_changes_the_logits_behind_it(name, changes, plain, dtype):
    model = made(name, **changes).to(dtype)
    assert head.is_plain(model, flow_grpo.log_probs) == plain


def test_another_definition_of_log_probs_is_followed_not_replaced():
    model = tiny()

    def entropy_term(logits, y, temperature):  # the same value, another gradient
        logps = (logits.float() / temperature).log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1)
        return flow_grpo.log_probs(logits, y, temperature) + 0.01 * (entropy - entropy.detach())

    def top(k):
        def log_probs(logits, y, temperature):
            least = logits.topk(k).values[:, -1:]
            return flow_grpo.log_probs(logits.masked_fill(logits < least, -1e9), y, temperature)
        return log_probs

    def without(token):
        def log_probs(logits, y, temperature):
            one = torch.arange(logits.shape[-1], device=logits.device) == token
            return flow_grpo.log_probs(logits.masked_fill(one, -1e9), y, temperature)
        return log_probs

    assert head.is_plain(model, flow_grpo.log_probs)
    for other in (lambda *given: 2 * flow_grpo.log_probs(*given), entropy_term, top(63), without(5),
                  lambda logits, *given: flow_grpo.log_probs(30 * (logits / 30).tanh(), *given),
                  lambda logits, *given: flow_grpo.log_probs(logits.clamp(-30, 30), *given),
                  lambda *given: flow_grpo.log_probs(*given).clamp(min=-30),
                  lambda logits, y, t: flow_grpo.log_probs(logits, y, max(t, 0.5))):
        assert not head.is_plain(model, other)


@pytest.mark.parametrize("chunk", [2**25, 64])
def test_log_probs_may_return_more_than_log_probs(chunk, monkeypatch):
    monkeypatch.setattr(head, "CHUNK", chunk)

    def with_entropy(logits, y, temperature):
        all_logps = (logits.float() / temperature).log_softmax(-1)
        chosen = all_logps.gather(-1, y[:, None]).squeeze(-1)
        return torch.stack([chosen, -(all_logps.exp() * all_logps).sum(-1)], 1)

    model, actions = tiny(), family()[0]
    monkeypatch.setattr(flow_grpo, "log_probs", with_entropy)
    found = logps.token_logps(model, actions, T, with_entropy)
    expected = flow_grpo.token_logps(model, actions, T)  # the plain way
    assert found.shape == expected.shape and found.shape[1] == 2
    assert (found - expected).abs().max() < ROUNDING


@pytest.mark.parametrize("toy", [TOY, HOPS])
def test_the_head_of_the_toys_is_plain(toy):
    assert head.is_plain(load_engine(str(toy)).model, flow_grpo.log_probs)


def test_the_head_is_put_back_after_an_error_and_a_model_can_be_copied():
    model = tiny()
    with pytest.raises(ZeroDivisionError), head.without_head(model, flow_grpo.log_probs):
        1 / 0
    logits = copy.deepcopy(model)(torch.tensor([[1, 2]])).logits
    assert logits.shape[-1] == 64 and "forward" not in vars(model.get_output_embeddings())


def replaced(layer, calls):
    """As accelerate's add_hook_to_module() does: forward() on the instance calls the old one, and more."""
    old = layer.forward

    def forward(states):
        calls.append(len(states))
        return 2 * old(states)
    layer.forward = forward
    return forward


@pytest.mark.parametrize("earlier", [False, True])
def test_a_forward_that_others_put_on_the_head_is_called_and_is_there_afterwards(earlier):
    model, calls = tiny(), []
    layer = model.get_output_embeddings()
    if earlier:  # found to be plain before somebody replaced it
        assert head.is_plain(model, flow_grpo.log_probs)
    forward = replaced(layer, calls)
    expected = torch.stack([logp for a in family()[0] for logp in one_by_one(model, a)])
    calls.clear()
    found = score(model)
    assert calls and vars(layer)["forward"] is forward and not head.is_plain(model, flow_grpo.log_probs)
    assert (found - expected).abs().max() < ROUNDING


def test_while_the_head_is_removed_the_states_are_right_and_then_its_own_forward_is_back():
    model, calls, x = tiny(), [], torch.tensor([[1, 2, 3]])
    layer, states = model.get_output_embeddings(), model.model(x).last_hidden_state
    forward = replaced(layer, calls)
    with pytest.raises(ZeroDivisionError), head.removed(layer):
        assert torch.equal(model(x).logits, states) and not calls
        1 / 0
    logits = 2 * torch.nn.functional.linear(states, layer.weight)
    assert layer.forward is forward and torch.equal(model(x).logits, logits) and calls


def test_a_hook_that_changes_the_logits_is_not_passed_over():
    model, padding = tiny(), torch.arange(64) >= 60  # of the vocabulary: no token has these ids
    mask = lambda layer, given, out: out.masked_fill(padding, -1e9) if out.shape[-1] == 64 else out
    model.get_output_embeddings().register_forward_hook(mask)
    assert not head.is_plain(model, flow_grpo.log_probs)


def test_what_is_found_out_about_a_model_draws_no_random_number_and_is_asked_once():
    model, calls = tiny(), []
    before = torch.get_rng_state()
    model.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        trees.shares(model), head.is_plain(model, flow_grpo.log_probs)
        assert len(calls) == 5
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.extras("peft")
def test_adapters_share_prompts_and_have_no_gradient_of_the_head():
    import peft
    settings = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(made("Qwen2"), settings).eval()
    assert trees.shares(model) and head.is_plain(model, flow_grpo.log_probs)
    expected = torch.stack([logp for a in family()[0] for logp in one_by_one(model, a)])
    assert (score(model) - expected).abs().max() < ROUNDING
    report, optimizer = learn(model, family()[0], [1.0, -1.0] * 4 + [1.0], reference=model, lr=0.0)
    assert report["kl"] > 0.01 and optimizer.gradients[0].norm() > 0
    assert not model.get_output_embeddings().weight.requires_grad
