"""Reports of a run to a person: seconds by stage, bytes by key, views, metrics, and the closing report."""
