{{- define "tessera.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tessera.fullname" -}}
{{- $name := include "tessera.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels by which selectors find the objects of this release. */}}
{{- define "tessera.selectorLabels" -}}
app.kubernetes.io/name: {{ include "tessera.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tessera.labels" -}}
{{ include "tessera.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels of the daemon's pods: those above, and which instance. Takes (dict "root" . "instance" I). */}}
{{- define "tessera.daemonLabels" -}}
{{ include "tessera.selectorLabels" .root }}
app.kubernetes.io/component: {{ .instance.component }}
{{- end -}}

{{/* The directory of the sockets, equal on the node and in every container. */}}
{{- define "tessera.directory" -}}
{{- .Values.socketDirectory.path | default (printf "/run/tessera/%s" .Release.Name) -}}
{{- end -}}

{{/* The claim by which workers in restricted namespaces mount the directory. */}}
{{- define "tessera.claimName" -}}
{{- printf "%s-sockets" (include "tessera.fullname" .) -}}
{{- end -}}

{{/* The Secret with the certificate of the TCP ports. */}}
{{- define "tessera.tlsSecret" -}}
{{- .Values.tcp.tls.secretName | default (printf "%s-tls" (include "tessera.fullname" .)) -}}
{{- end -}}

{{/* Takes (dict "root" . "instance" I). */}}
{{- define "tessera.image" -}}
{{- $image := .root.Values.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- $kind := ternary "cuda" "cpu" .instance.onGpu -}}
{{- printf "%s:%s" $image.repository ($image.tag | default (printf "%s-%s" .root.Chart.AppVersion $kind)) -}}
{{- end -}}
{{- end -}}

{{/* "true" if a switch is on: true, or auto in a cluster that has the custom resource.
     Takes (list root switch "group/version/Kind"). */}}
{{- define "tessera.isOn" -}}
{{- $root := index . 0 -}}
{{- $switch := index . 1 -}}
{{- if kindIs "bool" $switch -}}
{{- if $switch -}}true{{- end -}}
{{- else if $root.Capabilities.APIVersions.Has (index . 2) -}}
true
{{- end -}}
{{- end -}}
