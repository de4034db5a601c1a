#!/bin/bash
# halves_aot.sh PYTHON NAME VARIANT PIECES MODEL LAYERS TP MORE: compiles, keeps the scheduled HLO as halves/NAME.txt
mkdir -p halves; rm -rf halves/dump-$2
XLA_FLAGS="--xla_dump_to=halves/dump-$2 --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*prefill.* $FLAGS" PIECES=$4 PYTHONPATH=. nice -n 5 timeout 500 $1 $(dirname $0)/halves_aot.py halves $3 $5 $6 $7 "${8:-{\}}" > halves/$2.log 2>&1
cp halves/dump-$2/*prefill*gpu_after_optimizations.txt halves/$2.txt || tail -3 halves/$2.log
rm -rf halves/dump-$2
