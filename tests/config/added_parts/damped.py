"""An estimator: TD(lambda) whose advantages are made smaller."""

import rlcli
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.objectives.value.functional import td_lambda_return_estimate


@rlcli.register_estimator("damped")
class Damped(ValueEstimator):
    uses = ("value.lmbda",)

    def __init__(self, *, lmbda, scale=1.0, **options):
        super().__init__(**options)
        self.lmbda, self.scale = lmbda, scale

    def estimate(self, td, reward, ends, values, time_dim):
        target = td_lambda_return_estimate(
            self.gamma, self.lmbda, values.next_value, reward, *ends.flags(reward), time_dim=time_dim
        )
        return self.scale * (target - values.value), target
