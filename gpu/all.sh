#!/usr/bin/env bash
# Everything that docs/results/verl-h200.md and qwen-shape.md ask for, unattended, on a machine with two GPUs:  gpu/all.sh OUT
# One run a GPU at first, then each on both. OUT/all.log tells what has ended when, OUT/NAME/ holds a part's results. A part
# that has ended well is not done again, so the same command goes on after an interruption.
set -uo pipefail
out=$1; mkdir -p "$out"; out=$(realpath "$out")
export SITE=${SITE:-/tmp/site} WORK=${WORK:-/tmp/w}
w=$WORK
smol=(data.train_files="$w/data/spider_rl.parquet" data.val_files="$w/data/dev_500.parquet"
    actor_rollout_ref.model.path="$w/models/warm" trainer.total_training_steps=80)
shape=(engine.stack=current actor_rollout_ref.model.path="$w/models/shape" actor_rollout_ref.model.use_remove_padding=false
    'trainer.logger=["console"]' data.train_files="$w/data/train_spider.parquet" data.val_files="$w/data/dev.parquet"
    trainer.val_before_train=false trainer.test_freq=-1 runner.n_runners=128 runner.processes=4)
short=(data.max_response_length=150)
wide=(actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16)

part() { # NAME COMMAND...: once
    local name=$1 began; began=$(date +%s); shift
    [ -e "$out/$name/done" ] && return
    mkdir -p "$out/$name"
    if OUT=$out/$name "$@" > "$out/$name/said.txt" 2>&1; then touch "$out/$name/done"; fi
    echo "$(date +%T) $name: $(( $(date +%s) - began )) s, $(tail -n 1 "$out/$name/said.txt" | cut -c1-120)" >> "$out/all.log"
}
train() { bash gpu/train.sh "$@"; grep -q "^rc=0 \|^rc=124 " <(tail -n 40 "$2/log.txt"); } # 124: stopped after its time, saved
random() { PYTHONPATH=$SITE:src python3 -c 'from slurmlight.cli import main; main()' model random "$w/models/shape" \
    --like qwen3-1.7b --device cuda --tokenizer "$w/models/smol"; }

( export CUDA_VISIBLE_DEVICES=0
  part prepare bash gpu/smol.sh
  part smol train smol "$w/smol" "${FIRST:-420}" job.gpus=1 "${smol[@]}"
  part smol-resumed train smol "$w/smol" "${SECOND:-300}" job.gpus=1 "${smol[@]}"
  part smol-eval bash gpu/eval.sh "$out/smol-eval/eval" smol "$w/data/dev_500.parquet" run "$w/smol" "${smol[@]}" ) &
( export CUDA_VISIBLE_DEVICES=1
  until [ -f "$w/models/smol/tokenizer.json" ]; do sleep 2; done
  part random random
  part shape train qwen "$w/shape" 400 job.gpus=1 "${shape[@]}" "${short[@]}" "${wide[@]}" trainer.total_training_steps=5 trainer.save_freq=5
  rm -f "$w/shape/finished.json"
  part shape-resumed train qwen "$w/shape" 300 job.gpus=1 "${shape[@]}" "${short[@]}" "${wide[@]}" trainer.total_training_steps=8 \
      trainer.save_freq=50 actor_rollout_ref.rollout.gpu_memory_utilization=0.8
  part shape-long train qwen "$w/long" 300 job.gpus=1 "${shape[@]}" "${wide[@]}" agent.max_turns=1 trainer.total_training_steps=3 ) &
wait
part smol-2gpus train smol "$w/smol2" 300 job.gpus=2 "${smol[@]}" trainer.val_before_train=false trainer.test_freq=-1 trainer.total_training_steps=8
part shape-2gpus train qwen "$w/shape2" 300 job.gpus=2 "${shape[@]}" "${short[@]}" "${wide[@]}" trainer.total_training_steps=5 trainer.save_freq=5
cat "$out/all.log"
