"""Rows that are trees: what sequences begin with alike is computed once.
flow_grpo.update(rows=rows)

Measured on an H100 (docs/gpu.md): an update of a 7B's adapters, 16 x (4,096 + 256) tokens, takes
3.1 s, and 15.2 with a row for each action.

    what the model reads of three actions    the row that holds them
      A B C D                                 node      0  1  2  3  4  5
      A B C E                                 token     A  B  C  D  E  F        ends: 6 6 5 4 5 6
      A B F                                   position  0  1  2  3  3  2

(It reads prompt_ids + ids without the last token, which predicts nothing.)

Sorted, the sequences that share most are neighbours. Each one adds to the row only the tokens that
the one before it does not begin with: the nodes of a tree, in pre-order. So node j is an ancestor
of node i, or i itself, exactly if j <= i < end[j], where the subtree of j ends. That comparison is
the attention mask: each node sees its own sequence and nothing else. Equal completions of a prompt
share all of their nodes.

It is a mask, and not a KV cache: with gradient checkpointing, transformers drops a cache without a
word, and the prompt's part of the gradient would be lost.

In a layer with a sliding window (Mistral 0.1, Gemma 3), a node sees only its last ancestors. Trees
would be wrong for ALiBi (Bloom), a recurrent state (Mamba, Qwen3.5) and attention that takes no
such mask (Gemma 2, gpt-oss): are_right() finds out, and each action gets a row of its own.
"""

import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
from torch.nn.utils.rnn import pad_sequence

from models.local import MicroBatch

PADDING, SMALL = 0.1, 512  # at most this share of a micro-batch is padding, unless it is small
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, in configurations
OTHERS = "window_size", "attention_chunk_size"  # settings there of other windows


def rows(model, actions: Sequence, token_budget: int) -> Iterator[MicroBatch]:
    """Yield micro-batches, as flow_grpo.padded() does.

    Rows of similar length are neighbours. A micro-batch ends where the next row would exceed the
    budget, or make more than a tenth of it padding."""
    config = model.config.get_text_config()
    batch = []  # [(nodes, the actions of a row)]
    for nodes, row in sorted(shared_rows(model, actions, token_budget), key=size, reverse=True):
        if batch:
            slots = (len(batch) + 1) * size(batch[0])  # if the row joins the batch
            filled = sum(map(size, batch)) + nodes
            if slots > token_budget or slots > SMALL and filled < (1 - PADDING) * slots:
                yield layout([row for _, row in batch], config)
                batch = []
        batch.append((nodes, row))
    if batch:
        yield layout([row for _, row in batch], config)


def size(row):
    return row[0]


def sequence(action):
    """What the model reads of an action."""
    return (action.prompt_ids + action.ids)[:-1]


def shared_rows(model, actions, token_budget):
    """[(nodes, actions)]: which actions share a row.

    A node costs 6 x width in the layers and n in the attention of a row of n nodes, which has a
    dense mask. With p shared tokens and k others, a row costs 6 width (p + k) + (p + k)^2, which
    for each of the k is least at k^2 = p (p + 6 width). Longer rows would lose in attention what
    they save in layers."""
    width, found, before = model.config.get_text_config().hidden_size, [], []
    together = are_right(model)
    for action in sorted(actions, key=sequence):
        ids = sequence(action)
        shared = len(os.path.commonprefix([before, ids])) if found and together else 0
        nodes, row = found[-1] if found else (0, [])
        others, total, before = nodes - shared, nodes + len(ids) - shared, ids
        if shared and others**2 <= shared * (shared + 6 * width) and total <= token_budget:
            found[-1] = total, [*row, action]
        else:
            found.append((len(ids), [action]))
    return found


def tree(row):
    """The nodes of a row: tokens, positions, ends; and those that predict its actions."""
    ids, depths, ends, path, predicting = [], [], [], [], []  # path: nodes of the sequence before
    for action in row:
        read = sequence(action)
        shared = len(os.path.commonprefix([[ids[node] for node in path], read]))
        for node in path[shared:]:
            ends[node] = len(ids)
        path = path[:shared] + list(range(len(ids), len(ids) + len(read) - shared))
        ids += read[shared:]
        depths += range(shared, len(read))
        ends += [0] * (len(read) - shared)
        predicting += path[len(action.prompt_ids) - 1 :]
    for node in path:
        ends[node] = len(ids)
    return ids, depths, ends, predicting


def layout(rows, config):
    """The micro-batch of some rows, each a list of actions."""
    trees = [tree(row) for row in rows]
    matrix = lambda lists: pad_sequence(list(map(torch.tensor, lists)), batch_first=True)
    x, depths, ends = map(matrix, list(zip(*trees, strict=True))[:3])  # (B, L) each
    place = [n * x.shape[1] + node for n, (*_, nodes) in enumerate(trees) for node in nodes]
    settings = {}
    if any(len(row) > 1 for row in rows):
        settings = {"position_ids": depths, "attention_mask": masks(ends, depths, config)}
    actions = [action for row in rows for action in row]
    return MicroBatch(actions, x, torch.tensor(place), settings)


def mask(ends, depths, window=None):
    """(B, L) -> (B, 1, L, L): True where node i sees node j, itself or an ancestor less than
    `window` tokens before it. Padding, at the end, sees itself."""
    j = torch.arange(ends.shape[1])
    i = j[:, None]
    sees = (j <= i) & (i < ends[:, None, :]) | (j == i)
    if window:
        sees &= depths[:, :, None] - depths[:, None, :] < window
    return sees[:, None]


class Masks(dict):
    """{kind of layer: mask}, which moves to a device as a tensor does."""

    def to(self, device):
        return {kind: mask.to(device) for kind, mask in self.items()}


def masks(ends, depths, config):
    """One mask for all layers or, if their configuration names kinds, one for each kind."""
    window = getattr(config, "sliding_window", None)
    if (kinds := kinds_of(config)) <= {FULL}:
        return mask(ends, depths, window)
    windows = {FULL: None, SLIDING: window}
    return Masks({kind: mask(ends, depths, windows[kind]) for kind in kinds})


def kinds_of(config):
    return {*(getattr(config, "layer_types", None) or [])}


def are_right(model) -> bool:
    """May the rows of this model be trees? Found out once, from its configuration and by trying."""
    if not hasattr(model, "tree_rows"):
        config = model.config.get_text_config()
        kinds = kinds_of(config)
        # A window, though all layers are called full: which of the two is true?
        names = (*OTHERS, "sliding_window") if kinds == {FULL} else OTHERS
        unknown = any(getattr(config, name, None) for name in names)
        model.tree_rows = kinds <= {FULL, SLIDING} and not unknown and one_is_right(model)
    return model.tree_rows


@torch.no_grad()
def one_is_right(model):
    """Does a tree of two sequences get their logits, but for rounding?

    Rounding is measured against what the row gets without mask and positions, where the second
    sequence sees the first. The sequences are shorter than a window is: of windows, this shows
    only that the model takes their mask."""
    ends, config = ([9, 2, 6, 5], [3, 5, 8, 9]), model.config.get_text_config()
    two = [SimpleNamespace(prompt_ids=[3, 1, 4, 1, 5], ids=ids) for ids in ends]

    def logits(rows, plain=False):
        batch = layout(rows, config)
        settings = {} if plain else {k: v.to(model.device) for k, v in batch.settings.items()}
        out = model(batch.x.to(model.device), use_cache=False, **settings).logits.float()
        return out.flatten(0, 1)[batch.place]

    try:
        right, shared, wrong = logits([[a] for a in two]), logits([two]), logits([two], plain=True)
    except Exception:  # models refuse a mask or positions in many ways
        return False
    limit = torch.finfo(model.dtype).eps ** 0.5
    return bool((shared - right).norm() <= limit * (wrong - right).norm())
