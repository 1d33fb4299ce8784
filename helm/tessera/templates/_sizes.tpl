{{/* A size as a number of bytes: "8GiB" is 8589934592. Whole numbers throughout: a float would be
     printed as 8.589934592e+09, which the daemon must refuse. */}}
{{- define "tessera.bytes" -}}
{{- $factors := dict "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776 -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- $unit := regexFind "[A-Za-z]+$" . -}}
{{- if $unit -}}{{- mul $number (get $factors $unit) -}}{{- else -}}{{- $number -}}{{- end -}}
{{- end -}}

{{/* Bytes as a quantity of Kubernetes. */}}
{{- define "tessera.quantity" -}}
{{- $bytes := int64 . -}}
{{- if eq (mod $bytes 1048576) 0 -}}{{- printf "%dMi" (div $bytes 1048576) -}}{{- else -}}{{- $bytes -}}{{- end -}}
{{- end -}}

{{/* Bytes for people. */}}
{{- define "tessera.gib" -}}
{{- printf "%.1f GiB" (divf (float64 .) 1073741824.0) -}}
{{- end -}}
