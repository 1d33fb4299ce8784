{{/* The configuration file of an instance: DaemonConfig as JSON. Takes (dict "root" . "instance" I). */}}
{{- define "tessera.config" -}}
{{- $values := .root.Values -}}
{{- $one := .instance -}}
{{- /* Beside the socket for kubectl exec, in a volume of the pod. */ -}}
{{- $admin := "unix:/run/tessera-pod/tesserad.sock.admin" -}}
{{- $file := dict "listen" $one.listen "admin_listen" $admin "device" $one.device -}}
{{- range list "poolBytes" "hostTierBytes" "rawCopyBytes" -}}
{{- $_ := set $file (snakecase .) (get $one .) -}}
{{- end -}}
{{- range $name, $value := $one.config -}}
{{- if hasSuffix "Bytes" $name -}}
{{- $value = include "tessera.bytes" $value -}}
{{- else if kindIs "float64" $value -}}
{{- $value = int64 $value -}}
{{- end -}}
{{- $_ := set $file (snakecase $name) $value -}}
{{- end -}}
{{- $_ := set $file "metrics_address" (ternary (printf "%s:%d" $values.bindAddress (int64 $one.metricsPort)) "" $values.metrics.enabled) -}}
{{- if $values.tcp.enabled -}}
{{- $_ := set $file "tls_certificate_file" "/etc/tessera/tls/tls.crt" -}}
{{- $_ := set $file "tls_key_file" "/etc/tessera/tls/tls.key" -}}
{{- if $values.tcp.tls.clientCa -}}
{{- $_ := set $file "tls_client_ca_file" "/etc/tessera/tls/ca.crt" -}}
{{- end -}}
{{- end -}}
{{- $tenants := list -}}
{{- range $values.tenants -}}
{{- $tenant := dict "name" .name -}}
{{- if .token -}}
{{- $_ := set $tenant "token_file" (printf "/etc/tessera/tokens/%s" .name) -}}
{{- end -}}
{{- if .softLimitBytes -}}
{{- $_ := set $tenant "soft_limit_bytes" (include "tessera.bytes" .softLimitBytes) -}}
{{- end -}}
{{- if .hardLimitBytes -}}
{{- $_ := set $tenant "hard_limit_bytes" (include "tessera.bytes" .hardLimitBytes) -}}
{{- end -}}
{{- if .reservedBytes -}}
{{- $_ := set $tenant "reserved_bytes" (include "tessera.bytes" .reservedBytes) -}}
{{- end -}}
{{- if .maxSessions -}}
{{- $_ := set $tenant "max_sessions" (int64 .maxSessions) -}}
{{- end -}}
{{- $tenants = append $tenants $tenant -}}
{{- end -}}
{{- if $tenants -}}
{{- $_ := set $file "tenants" $tenants -}}
{{- end -}}
{{- toPrettyJson $file -}}
{{- end -}}
