"""The team whose memory and seconds the tests of planning compute."""

TEAM = """
name: plan
task: {{name: code, half_length: 1}}
team:
  model: tiny
  train: {train}
  max_tokens: 4
  agents: [{{name: left}}, {{name: right}}, {{name: speaker}}]
tiny: {{layers: 1, width: 32, heads: 4, warmup_steps: 0}}
plan: {{problems: 2, group_size: 2}}
learner: {{micro_batch: 8}}
sampling: {{engine: {engine}}}
"""
