"""Decorators that clients' tests put on their cases."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def get_arch_major() -> int:
    """Major compute capability of the current CUDA device (Hopper: 9); 0 without a GPU."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


def test_filter(condition: Callable[[], bool]) -> Decorator:
    """Decorator: call the function where `condition()` holds, else say that it was left out."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if condition():
                return function(*args, **kwargs)
            print(f"{function.__name__}: left out, its condition does not hold")
            return None

        return wrapper

    return decorate


test_filter.__test__ = False  # type: ignore[attr-defined]  # the name looks like a test to pytest


def ignore_env(name: str, condition: Callable[[], bool]) -> Decorator:
    """Decorator: run the function without environment variable `name` where `condition()` holds."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            saved = os.environ.pop(name, None) if condition() else None
            try:
                return function(*args, **kwargs)
            finally:
                if saved is not None:
                    os.environ[name] = saved

        return wrapper

    return decorate
