"""What torch's agent asks of its ranks' output and error files: `RankStreams` as its log specification."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from .streams import RankStreams
from .worker import ERROR_VARIABLE


class AgentLogs(LogsSpecs):
    """Hands each rank that the agent starts its environment."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        streams: RankStreams,
    ) -> None:
        """``names`` and ``environments`` by local rank."""
        super().__init__()
        self._folder = folder
        self._names = names
        self._environments = environments
        self._streams = streams

    @property
    def root_log_dir(self) -> str:
        """Folder of the error files."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called before ranks start: their environments, and where they write."""
        errors = {}
        for local, env in envs.items():
            env.update(self._streams.variables(self._names[local]))
            errors[local] = env[ERROR_VARIABLE]
            env.update(self._environments[local])
        inherited = dict.fromkeys(envs, "")
        return LogsDest(stdouts=inherited, stderrs=dict(inherited), error_files=errors)
