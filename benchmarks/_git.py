"""What git says of this repository."""

from __future__ import annotations

import os
import subprocess


def git(*arguments: str, content: str | None = None, **environment: str) -> str:
    """What git says, without blanks around it; `content` is what it reads.

    Raises:
        subprocess.CalledProcessError: it fails.
    """
    command, environment = ["git", *arguments], {**os.environ, **environment}
    return subprocess.check_output(command, input=content, text=True, env=environment).strip()


def git_or_nothing(*arguments: str) -> str:
    """The same, and nothing where it fails."""
    found = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return "" if found.returncode else found.stdout.strip()
