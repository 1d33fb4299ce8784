{{- define "tessera.monitoringMetadata" -}}
name: {{ include "tessera.fullname" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "tessera.labels" . | nindent 2 }}
  {{- with .Values.metrics.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* How a port is scraped. Dashboards and alerts need these two labels: the job contains
     "tessera", and the node is the Kubernetes node. */}}
{{- define "tessera.scrape" -}}
path: /metrics
interval: {{ .Values.metrics.interval }}
relabelings:
  - targetLabel: job
    replacement: tessera
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: node
{{- end -}}
