"""Hosts with network stacks of their own on this machine: Linux network namespaces on a switch.

The switch is a bridge in a namespace of its own, so nothing of all this appears in the machine's
own network, and deleting the namespaces deletes everything. Tests talk to processes there by Unix
sockets that have a path: abstract ones belong to a network namespace, paths do not.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess

IP = shutil.which("ip") or "/usr/sbin/ip"
_numbers = itertools.count()


class UnavailableError(Exception):
    """Network namespaces cannot be made here; the text says why."""


def ip(*arguments):
    """Run ``ip``."""
    try:
        done = subprocess.run([IP, *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UnavailableError(f"no program `ip` (package iproute2): {error}") from error
    if done.returncode:
        raise UnavailableError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class Host:
    """One host. Made by `Network`.

    Args:
        namespace: Its network namespace.
        switch: The switch's.
        number: Of this host.
    """

    def __init__(self, namespace, switch, number):
        self.namespace = namespace
        self.address = f"10.77.0.{number + 1}"
        """What the other hosts reach it by."""
        self._switch, self._port = switch, f"port{number}"
        self._processes = []
        wire = ("type", "veth", "peer", "name", self._port, "netns", switch)
        ip("link", "add", "eth0", "netns", namespace, *wire)
        ip("-n", switch, "link", "set", self._port, "master", "bridge")
        ip("-n", namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", namespace, "link", "set", "lo", "up")
        ip("-n", namespace, "link", "set", "eth0", "up")
        self.link(up=True)

    def run(self, argv, **options):
        """Start a program on this host.

        Args:
            argv: As `subprocess.Popen` has it.
            **options: Of `subprocess.Popen`.

        Returns:
            The process; killed at the latest when the network is closed.
        """
        # It becomes the program, and does not wait for it: the pid is the program's.
        argv = [IP, "netns", "exec", self.namespace, *argv]
        self._processes.append(subprocess.Popen(argv, **options))
        return self._processes[-1]

    def link(self, *, up):
        """Plug its cable in or out at the switch: packets vanish, and nobody is told."""
        ip("-n", self._switch, "link", "set", self._port, "up" if up else "down")

    def end(self):
        """Kill what runs on it."""
        for process in self._processes:
            process.kill()
            process.wait()
        for pid in ip("netns", "pids", self.namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)


class Network:
    """Some hosts on one switch; a context manager.

    Args:
        num_hosts: How many.

    Raises:
        UnavailableError: This machine does not let us.
    """

    def __init__(self, num_hosts):
        self.hosts = []
        with contextlib.ExitStack() as stack:
            name = f"wt-{os.getpid()}-{next(_numbers)}"
            switch = _made(stack, f"{name}-switch")
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge", "up")
            for number in range(num_hosts):
                host = Host(_made(stack, f"{name}-{number}"), switch, number)
                stack.callback(host.end)
                self.hosts.append(host)
            self._stack = stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._stack.close()


def _made(stack, namespace):
    ip("netns", "add", namespace)
    stack.callback(ip, "netns", "delete", namespace)
    return namespace
