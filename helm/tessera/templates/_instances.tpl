{{/* The instances with everything that they inherit, as a JSON list. Each has:
     name, component, index, fullname, device, hasUuid, onGpu, poolBytes, hostTierBytes,
     rawCopyBytes (numbers as text), config, nodeSelector, tolerations, affinity, metricsPort,
     tcpPort, listen (list), address (for workers), testAddress (of the socket itself, if its name is
     known here), graceSeconds, leastGraceSeconds, memoryBytes. */}}
{{- define "tessera.instances" -}}
{{- $root := . -}}
{{- $values := .Values -}}
{{- $named := gt (len $values.instances) 0 -}}
{{- $all := list -}}
{{- range $index, $own := ($values.instances | default (list (dict "name" "daemon"))) -}}
{{- $device := $own.device | default $values.device -}}
{{- $hasUuid := ne $device "cpu" -}}
{{- $onGpu := and $hasUuid (not (hasPrefix "CPU-" $device)) -}}
{{- $one := dict "name" $own.name "component" $own.name "index" $index "device" $device "hasUuid" $hasUuid "onGpu" $onGpu -}}
{{- $_ := set $one "fullname" (include "tessera.fullname" $root) -}}
{{- if $named -}}
{{- $_ := set $one "fullname" (printf "%s-%s" $one.fullname $own.name) -}}
{{- end -}}
{{- $memory := int64 (include "tessera.bytes" $values.resources.memoryOverheadBytes) -}}
{{- range $key := list "poolBytes" "hostTierBytes" "rawCopyBytes" -}}
{{- $bytes := include "tessera.bytes" (get $own $key | default (get $values $key)) -}}
{{- $_ := set $one $key $bytes -}}
{{- if or (ne $key "poolBytes") (not $onGpu) -}}
{{- $memory = add $memory (int64 $bytes) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $one "memoryBytes" (toString $memory) -}}
{{- $config := mergeOverwrite (deepCopy $values.config) (deepCopy ($own.config | default dict)) -}}
{{- $_ := set $one "config" $config -}}
{{- $drainSeconds := div (add (int64 $config.drainLimitMs) 999) 1000 -}}
{{- $_ := set $one "leastGraceSeconds" (add $drainSeconds 6) -}}
{{- $_ := set $one "graceSeconds" (int64 $values.terminationGracePeriodSeconds | default (add $drainSeconds 6)) -}}
{{- $_ := set $one "metricsPort" (add (int64 $values.metrics.port) $index) -}}
{{- $_ := set $one "tcpPort" (add (int64 $values.tcp.port) $index) -}}
{{- include "tessera.setPlacement" (dict "values" $values "own" $own "one" $one) -}}
{{- include "tessera.setAddresses" (dict "root" $root "one" $one "named" $named) -}}
{{- $all = append $all $one -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{/* Sets the sockets of an instance and the address for its workers. Workers find the socket of their
     GPU in the directory by its UUID: a device plugin numbers GPUs anew in each container. */}}
{{- define "tessera.setAddresses" -}}
{{- $directory := include "tessera.directory" .root -}}
{{- $socket := ternary "{uuid}.sock" (printf "%s.sock" (ternary .one.name "tesserad" .named)) .one.hasUuid -}}
{{- $listen := list (printf "unix:%s/%s" $directory $socket) (include "tessera.podAddress" .root) -}}
{{- if .root.Values.tcp.enabled -}}
{{- $listen = append $listen (printf "%s:%d" .root.Values.bindAddress (int64 .one.tcpPort)) -}}
{{- end -}}
{{- $_ := set .one "listen" $listen -}}
{{- $_ := set .one "address" (printf "unix:%s/%s" $directory (ternary "" $socket .one.hasUuid)) -}}
{{- $_ := set .one "testAddress" .one.address -}}
{{- $uuid := regexFind "-.+$" .one.device | lower -}}
{{- if $uuid -}}
{{- $_ := set .one "testAddress" (printf "unix:%s/%s%s.sock" $directory (substr 0 3 .one.device) $uuid) -}}
{{- end -}}
{{- end -}}

{{/* A socket that only the daemon's own pod sees: for commands by `kubectl exec`, whatever the names
     of the other sockets, and for probes without a metrics port. */}}
{{- define "tessera.podAddress" -}}
unix:/run/tessera-pod/tesserad.sock
{{- end -}}

{{/* Sets nodeSelector, tolerations and affinity of an instance, with those for GPU nodes. */}}
{{- define "tessera.setPlacement" -}}
{{- $values := .values -}}
{{- $selector := deepCopy (.own.nodeSelector | default $values.nodeSelector | default dict) -}}
{{- $tolerations := .own.tolerations | default $values.tolerations | default list -}}
{{- $affinity := deepCopy (.own.affinity | default $values.affinity | default dict) -}}
{{- if .one.onGpu -}}
{{- $selector = merge $selector (deepCopy ($values.gpu.nodeSelector | default dict)) -}}
{{- $tolerations = concat $tolerations ($values.gpu.tolerations | default list) -}}
{{- if $values.gpu.leaveForDriverUpgrade -}}
{{- include "tessera.addDriverUpgradeRule" $affinity -}}
{{- end -}}
{{- end -}}
{{- $_ := set .one "nodeSelector" $selector -}}
{{- $_ := set .one "tolerations" $tolerations -}}
{{- $_ := set .one "affinity" $affinity -}}
{{- end -}}

{{/* Adds to an affinity: not on nodes whose GPU driver is being upgraded. The GPU Operator waits for
     pods that claim a GPU, and ignores DaemonSets. This daemon claims none and keeps the driver's
     module in use. The DaemonSet controller removes its pod from a node that no longer matches.
     Terms are alternatives, so each of them gets the rule. */}}
{{- define "tessera.addDriverUpgradeRule" -}}
{{- $states := list "cordon-required" "wait-for-jobs-required" "pod-deletion-required" "drain-required" "pod-restart-required" "upgrade-failed" -}}
{{- $rule := dict "key" "nvidia.com/gpu-driver-upgrade-state" "operator" "NotIn" "values" $states -}}
{{- $nodeAffinity := .nodeAffinity | default dict -}}
{{- $required := $nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution | default dict -}}
{{- $terms := list -}}
{{- range ($required.nodeSelectorTerms | default (list (dict))) -}}
{{- $terms = append $terms (set . "matchExpressions" (append (.matchExpressions | default list) $rule)) -}}
{{- end -}}
{{- $_ := set $required "nodeSelectorTerms" $terms -}}
{{- $_ := set $nodeAffinity "requiredDuringSchedulingIgnoredDuringExecution" $required -}}
{{- $_ := set . "nodeAffinity" $nodeAffinity -}}
{{- end -}}
