{{/* What every container of the chart runs with. */}}
{{- define "tessera.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Where the pods of an instance run. Takes the instance. */}}
{{- define "tessera.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A probe. Takes (dict "root" . "ready" BOOL). */}}
{{- define "tessera.probe" -}}
{{- if .root.Values.metrics.enabled -}}
httpGet:
  path: {{ ternary "/readyz" "/healthz" .ready }}
  port: metrics
{{- else -}}
exec:
  command:
    - /usr/bin/tessera
    - health
    {{- if .ready }}
    - --ready
    {{- end }}
    - --address={{ include "tessera.podAddress" .root }}
{{- end }}
timeoutSeconds: 3
{{- end -}}

{{/* The tenants' tokens as sources of one projected volume, one file for each tenant. */}}
{{- define "tessera.tokenSources" -}}
{{- range .Values.tenants }}
{{- if .token }}
- secret:
    name: {{ .token.secretName }}
    items:
      - key: {{ .token.key }}
        path: {{ .name }}
{{- end }}
{{- end }}
{{- end -}}
