{{/* Refuses values that the schema cannot judge. Every message names the value and what to do. */}}
{{- define "tessera.check" -}}
{{- $instances := include "tessera.instances" . | fromJsonArray -}}
{{- include "tessera.checkInstances" (dict "root" . "instances" $instances) -}}
{{- include "tessera.checkDirectory" . -}}
{{- include "tessera.checkTenants" (dict "root" . "instances" $instances) -}}
{{- include "tessera.checkTcp" (dict "root" . "instances" $instances) -}}
{{- include "tessera.checkOptions" . -}}
{{- end -}}

{{- define "tessera.checkInstances" -}}
{{- $values := .root.Values -}}
{{- $names := list -}}
{{- $ports := list -}}
{{- $places := list -}}
{{- range .instances -}}
{{- $what := printf "of instance %s" .name -}}
{{- if has .name $names -}}
{{- fail (printf "instances: two have the name \"%s\"" .name) -}}
{{- end -}}
{{- if has .name (list "test" "example-worker") -}}
{{- fail (printf "instances: the name \"%s\" is that of other pods of the chart" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- if eq .device "cuda:all" -}}
{{- fail (printf "device %s is cuda:all: a daemon serves one device; list one instance for each GPU in instances, with device: cuda:0, cuda:1 and so on" $what) -}}
{{- end -}}
{{- $place := toJson (list .device .nodeSelector .affinity) -}}
{{- if and .hasUuid (has $place $places) -}}
{{- fail (printf "instances: device %s %s is taken by another instance on the same nodes" .device $what) -}}
{{- end -}}
{{- $places = append $places $place -}}
{{- include "tessera.checkSizes" (dict "root" $.root "instance" . "what" $what) -}}
{{- if and (int64 $values.terminationGracePeriodSeconds) (lt (int64 .graceSeconds) (int64 .leastGraceSeconds)) -}}
{{- fail (printf "terminationGracePeriodSeconds is %d: a drain %s takes up to config.drainLimitMs, %d ms, and then some: set at least %d, or 0" (int64 .graceSeconds) $what (int64 .config.drainLimitMs) (int64 .leastGraceSeconds)) -}}
{{- end -}}
{{- if gt (int64 .config.pressureLowPercent) (int64 .config.pressureHighPercent) -}}
{{- fail (printf "config.pressureLowPercent %s is %d: the most is config.pressureHighPercent, %d" $what (int64 .config.pressureLowPercent) (int64 .config.pressureHighPercent)) -}}
{{- end -}}
{{- range $name, $port := dict "metrics.port" .metricsPort "tcp.port" .tcpPort -}}
{{- if gt (int64 $port) 65535 -}}
{{- fail (printf "%s and the instances' index give port %d %s: the most is 65535" $name (int64 $port) $what) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tessera.checkSizes" -}}
{{- $instance := .instance -}}
{{- $what := .what -}}
{{- $extent := int64 (include "tessera.bytes" $instance.config.poolExtentBytes) -}}
{{- $limits := .root.Files.Get "files/size-limits.json" | fromJson -}}
{{- $sizes := dict "rawCopyBytes" $instance.rawCopyBytes "hostTierBytes" $instance.hostTierBytes -}}
{{- range $name, $value := $instance.config -}}
{{- if hasSuffix "Bytes" $name -}}
{{- $_ := set $sizes $name (include "tessera.bytes" $value) -}}
{{- end -}}
{{- end -}}
{{- range $name, $bytes := $sizes -}}
{{- with get $limits $name -}}
{{- if or (lt (int64 $bytes) (int64 (index . 0))) (gt (int64 $bytes) (int64 (index . 1))) -}}
{{- fail (printf "%s %s is %s bytes: it must be from %s to %s" $name $what $bytes (index . 0) (index . 1)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $pool := int64 $instance.poolBytes -}}
{{- if or (eq $pool 0) (ne (mod $pool $extent) 0) -}}
{{- fail (printf "poolBytes %s is %d bytes: it must be a positive multiple of config.poolExtentBytes, %s" $what $pool $instance.config.poolExtentBytes) -}}
{{- end -}}
{{- end -}}

{{- define "tessera.checkDirectory" -}}
{{- $directory := include "tessera.directory" . -}}
{{- if has $directory (list "/run" "/run/tessera" "/tmp" "/var" "/var/run" "/var/lib" "/etc") -}}
{{- fail (printf "socketDirectory.path is %s: give the sockets a directory of their own below it, because the daemon's user will own it" $directory) -}}
{{- end -}}
{{- if contains "/../" (printf "%s/" $directory) -}}
{{- fail (printf "socketDirectory.path is %s: it must not contain .." $directory) -}}
{{- end -}}
{{- $group := regexFind "[0-7]{2}$" .Values.socketDirectory.mode | substr 0 1 | int -}}
{{- range (include "tessera.instances" . | fromJsonArray) -}}
{{- if and .hasUuid (lt $group 5) -}}
{{- fail (printf "socketDirectory.mode is %s: workers look for the socket of their device in the directory, so its group must be able to read and search it, as in 0750" $.Values.socketDirectory.mode) -}}
{{- end -}}
{{- $socket := index .listen 0 | trimPrefix "unix:" | replace "{uuid}" (repeat 40 "x") -}}
{{- if gt (len $socket) 101 -}}
{{- fail (printf "socketDirectory.path is %s: with the name of the socket that is %d bytes, the limit is 101; set a shorter path" $directory (len $socket)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tessera.checkTenants" -}}
{{- $names := list -}}
{{- $tokens := list -}}
{{- range .root.Values.tenants -}}
{{- if has .name $names -}}
{{- fail (printf "tenants: two have the name \"%s\"" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- $token := .token | toJson -}}
{{- if has $token $tokens -}}
{{- fail (printf "tenants: \"%s\" has the token of another tenant; give each its own token.secretName and token.key, and leave it out for one tenant at most" .name) -}}
{{- end -}}
{{- $tokens = append $tokens $token -}}
{{- $soft := int64 (include "tessera.bytes" (.softLimitBytes | default "0")) -}}
{{- $hard := int64 (include "tessera.bytes" (.hardLimitBytes | default "0")) -}}
{{- if and $hard (gt $soft $hard) -}}
{{- fail (printf "tenants: softLimitBytes of \"%s\" is %s: the most is its hardLimitBytes, %s" .name .softLimitBytes .hardLimitBytes) -}}
{{- end -}}
{{- $tenant := .name -}}
{{- range $.instances -}}
{{- if gt (max $soft $hard) (int64 .poolBytes) -}}
{{- fail (printf "tenants: a limit of \"%s\" is %d bytes: poolBytes of instance %s is %s" $tenant (max $soft $hard) .name .poolBytes) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if gt (len $names) 256 -}}
{{- fail (printf "tenants: there are %d, the limit is 256" (len $names)) -}}
{{- end -}}
{{- end -}}

{{- define "tessera.checkTcp" -}}
{{- $tcp := .root.Values.tcp -}}
{{- if $tcp.enabled -}}
{{- if and (not $tcp.tls.secretName) (not $tcp.tls.certManager.enabled) -}}
{{- fail "tcp.enabled needs TLS, or tokens, keys and values would cross the network in the clear: set tcp.tls.secretName or tcp.tls.certManager.enabled" -}}
{{- end -}}
{{- if and $tcp.tls.certManager.enabled (not $tcp.tls.certManager.issuerRef.name) -}}
{{- fail "tcp.tls.certManager.enabled needs tcp.tls.certManager.issuerRef.name" -}}
{{- end -}}
{{- if .root.Values.metrics.enabled -}}
{{- $ports := list -}}
{{- range .instances -}}{{- $ports = concat $ports (list (int64 .metricsPort) (int64 .tcpPort)) -}}{{- end -}}
{{- if ne (len $ports) (len (uniq $ports)) -}}
{{- fail (printf "tcp.port %d and metrics.port %d overlap: each instance takes the next of both" (int64 $tcp.port) (int64 .root.Values.metrics.port)) -}}
{{- end -}}
{{- end -}}
{{- else if or $tcp.tls.secretName $tcp.tls.certManager.enabled -}}
{{- fail "tcp.tls needs tcp.enabled: Unix sockets use no TLS" -}}
{{- end -}}
{{- end -}}

{{- define "tessera.checkOptions" -}}
{{- $metrics := .Values.metrics -}}
{{- $both := and (include "tessera.isOn" (list . $metrics.podMonitor "monitoring.coreos.com/v1/PodMonitor")) (include "tessera.isOn" (list . $metrics.serviceMonitor "monitoring.coreos.com/v1/ServiceMonitor")) -}}
{{- if and $metrics.enabled $both -}}
{{- fail "metrics.podMonitor and metrics.serviceMonitor are both on: every daemon would be scraped twice; set one to false" -}}
{{- end -}}
{{- if and (not $metrics.enabled) (or (eq (toString $metrics.podMonitor) "true") (eq (toString $metrics.serviceMonitor) "true")) -}}
{{- fail "metrics.podMonitor and metrics.serviceMonitor need metrics.enabled" -}}
{{- end -}}
{{- if and (eq .Values.gpu.access "dra-admin") (not (semverCompare ">=1.34.0-0" .Capabilities.KubeVersion.Version)) -}}
{{- fail (printf "gpu.access is dra-admin: it needs resource.k8s.io/v1, from Kubernetes 1.34 on; this is %s" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and .Values.exampleWorker.enabled (eq .Values.exampleWorker.volume "claim") (not .Values.workerNamespaces) -}}
{{- fail "exampleWorker.volume is claim: name a namespace in workerNamespaces" -}}
{{- end -}}
{{- range $label, $_ := .Values.podLabels -}}
{{- if hasPrefix "app.kubernetes.io/" $label -}}
{{- fail (printf "podLabels contains %s, which the chart sets" $label) -}}
{{- end -}}
{{- end -}}
{{- if has .Release.Namespace .Values.workerNamespaces -}}
{{- fail (printf "workerNamespaces contains %s, the release's namespace: it allows hostPath, or the daemon could not run in it" .Release.Namespace) -}}
{{- end -}}
{{- if ne (len .Values.workerNamespaces) (len (uniq .Values.workerNamespaces)) -}}
{{- fail "workerNamespaces contains a namespace twice" -}}
{{- end -}}
{{- end -}}
