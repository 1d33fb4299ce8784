{{/* How a pod sees the GPUs of its node without claiming one. All take (dict "root" . "instance" I)
     and are empty for a daemon on the CPU. */}}

{{- define "tessera.gpuAccess" -}}
{{- if .instance.onGpu -}}{{- .root.Values.gpu.access -}}{{- end -}}
{{- end -}}

{{- define "tessera.gpuAnnotations" -}}
{{- if eq (include "tessera.gpuAccess" .) "cdi" -}}
cdi.k8s.io/tessera: {{ .root.Values.gpu.cdiDevice | quote }}
{{- end -}}
{{- end -}}

{{- define "tessera.gpuPodSpec" -}}
{{- $access := include "tessera.gpuAccess" . -}}
{{- if eq $access "runtimeClass" -}}
runtimeClassName: {{ .root.Values.gpu.runtimeClassName }}
{{- else if eq $access "dra-admin" -}}
resourceClaims:
  - name: gpus
    resourceClaimTemplateName: {{ include "tessera.fullname" .root }}-gpus
{{- end -}}
{{- end -}}

{{- define "tessera.gpuEnv" -}}
{{- if eq (include "tessera.gpuAccess" .) "runtimeClass" -}}
- name: NVIDIA_VISIBLE_DEVICES
  value: {{ .root.Values.gpu.visibleDevices | quote }}
- name: NVIDIA_DRIVER_CAPABILITIES
  value: compute,utility
{{- end -}}
{{- end -}}

{{- define "tessera.gpuResources" -}}
{{- if eq (include "tessera.gpuAccess" .) "dra-admin" -}}
claims:
  - name: gpus
{{- end -}}
{{- end -}}
