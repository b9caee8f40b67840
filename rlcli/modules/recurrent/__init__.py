"""Networks that remember: GRU and LSTM on tensordicts, one step at a time or over whole sequences at once."""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.modules.recurrent.modules import GRUModule as GRUModule
    from rlcli.modules.recurrent.modules import LSTMModule as LSTMModule
    from rlcli.modules.recurrent.modules import Recurrence as Recurrence
    from rlcli.modules.recurrent.modules import RecurrentModule as RecurrentModule
    from rlcli.modules.recurrent.sequences import recurrent_mode as recurrent_mode
    from rlcli.modules.recurrent.sequences import set_recurrent_mode as set_recurrent_mode

__getattr__, __dir__, __all__ = lazily(__name__)
