"""Homes on four devices, and random placements over them."""

import hypothesis.strategies as st

from sharding.placement import Home, Homes, Placement

D0, D1, D2, D3 = (Home(i, 1) for i in range(4))
P0, P1 = Home(0, 2), Home(2, 2)
Q = Home(0, 4)


@st.composite
def homes_of_a_module(draw: st.DrawFn, num_microbatches: int) -> Homes:
    """Draw homes that share no device. Several microbatches may have the same home."""
    homes = draw(st.sampled_from([(Q,), (P0, P1), (P0, D2, D3), (D0, D1, P1), (D3, D2, D1, D0)]))
    return tuple(draw(st.lists(st.sampled_from(homes), min_size=num_microbatches, max_size=num_microbatches)))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_layers, num_microbatches = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    kinds = draw(st.lists(homes_of_a_module(num_microbatches), min_size=1, max_size=3))
    modules = st.lists(st.sampled_from(kinds), min_size=num_layers, max_size=num_layers)
    attention = draw(modules)
    ffn = attention if draw(st.booleans()) else draw(modules)
    return Placement(draw(st.sampled_from([Q, P0, D0, D3])), tuple(attention), tuple(ffn))
