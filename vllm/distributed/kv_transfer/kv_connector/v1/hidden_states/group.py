# SPDX-License-Identifier: Apache-2.0
"""Where the captured hidden states are among the state groups."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.hidden_states_storage import RowFormat, StorageDtype
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

#: part of the layer's name, for configurations that do not show its spec
LAYER_NAME_MARKER = "cache_only_layers"


@dataclass(frozen=True)
class HiddenStatesGroup:
    """`index` among the groups, the group's own `block_size`, and the layer in it.

    `layer_name` is None where the scheduler's view of the group does not single the layer out.
    `spec`: the layer's, or what that view shows of it.
    """

    index: int
    block_size: int
    layer_name: str | None
    spec: KVCacheSpec

    def row_format(self, storage: StorageDtype) -> RowFormat:
        """Of the layer's rows; ValueError where its spec is not shown."""
        if not self.spec.is_hidden_states:
            raise ValueError(
                f"state group {self.index} shows {self.spec.label}, not its captured hidden states"
            )
        [view] = self.spec.views
        _, columns, hidden = view.shape
        return RowFormat(columns, hidden, view.dtype, storage)


def find_hidden_states_group(kv_cache_config: KVCacheConfig) -> HiddenStatesGroup:
    """The group that holds captured hidden states, as the layers' specs say.

    A sole group is it whatever its spec says, since a scheduler may see only its first member.
    On a pipeline stage that does not hold the layer, the group has no name.
    ValueError when there is no such group or more than one.
    """
    groups = kv_cache_config.kv_cache_groups
    found: list[tuple[int, str | None]] = [
        (i, name)
        for i, group in enumerate(groups)
        for name, spec in group.layer_specs.items()
        if spec.is_hidden_states
    ]
    found += [
        (i, None)
        for i, group in enumerate(groups)
        if not group.layer_names and group.kv_cache_spec.is_hidden_states
    ]
    if len(found) == 1:
        index, name = found[0]
        spec = groups[index].kv_cache_spec
        layer_spec = spec if name is None else spec.of_layer(name)
        return HiddenStatesGroup(index, spec.block_size, name, layer_spec)
    if not found and len(groups) == 1:
        names = [n for n in groups[0].layer_names if LAYER_NAME_MARKER in n]
        layer_name = names[0] if len(names) == 1 else None
        spec = groups[0].kv_cache_spec
        return HiddenStatesGroup(0, spec.block_size, layer_name, spec)
    raise ValueError(
        f"expected one layer of captured hidden states in {len(groups)} state group(s), found "
        f"{len(found)}; extraction needs speculative_config.method extract_hidden_states"
    )
