# SPDX-License-Identifier: Apache-2.0
"""Whether there is a cluster at `RAY_ADDRESS`, asked without Ray, which starts threads when it is
imported and would look for the cluster without end."""

from vllm.distributed.rendezvous import connect
from vllm.exceptions import VLLMValidationError

_CLIENT = "ray://"


def await_cluster(address: str, timeout_s: float) -> None:
    """Returns when something listens at `address`; at once for one without a port (none, `auto`,
    `local`), of which Ray knows more.

    Raises `StartTimeoutError` if nobody listens there in that time, `VLLMValidationError` for the
    address of Ray Client.
    """
    if address.startswith(_CLIENT):
        raise VLLMValidationError(
            f"RAY_ADDRESS={address} is that of Ray Client, which runs drivers elsewhere; give the "
            "HOST:PORT of the cluster's head node (6379 by default), and join the cluster here by "
            "`ray start --address HOST:PORT`",
            "distributed_executor_backend",
        )
    host, _, port = address.rpartition(":")
    if port.isdigit():
        whom = f"the Ray cluster of RAY_ADDRESS={address}"
        connect(host.strip("[]"), int(port), timeout_s, whom).close()
