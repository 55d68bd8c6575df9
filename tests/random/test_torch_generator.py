"""Torch has one generator in a process: who draws from a seed of its own is alone with it."""

import threading

import torch

from shoal.random.torch_generator import seeded


def test_two_threads_never_draw_from_each_others_seeds():
    entered, drawn, found = threading.Event(), threading.Event(), []

    def other():
        with seeded(2):
            entered.set()
            drawn.wait(60)
            found.append(torch.rand(3))

    thread = threading.Thread(target=other)
    with seeded(1):
        thread.start()
        entered.wait(0.2)  # which it does where nothing keeps it out
        found.append(torch.rand(3))
        drawn.set()
    thread.join()
    for seed, got in zip((1, 2), found, strict=True):
        with seeded(seed):
            assert torch.equal(got, torch.rand(3))


def test_what_others_draw_is_as_if_nothing_had_been_drawn():
    torch.manual_seed(5)
    want = torch.rand(2)
    torch.manual_seed(5)
    with seeded(1), seeded(3):
        torch.rand(7)
    assert torch.equal(torch.rand(2), want)
