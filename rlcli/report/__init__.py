"""What a run tells a person: seconds by stage, bytes by key, views, metrics, and the closing report."""
