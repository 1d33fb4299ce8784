{{/* What a worker pod needs to reach the daemon of its node. In this chart: `include NAME .`; in a
     chart that has this one as a dependency: `include NAME .Subcharts.tessera`. */}}

{{/* An item of the pod's `volumes`. */}}
{{- define "tessera.workerVolume" -}}
- name: tessera
  hostPath:
    path: {{ include "tessera.directory" . }}
    type: Directory
{{- end -}}

{{/* The same for a namespace of workerNamespaces, which forbids hostPath. */}}
{{- define "tessera.workerClaimVolume" -}}
- name: tessera
  persistentVolumeClaim:
    claimName: {{ include "tessera.claimName" . }}
    readOnly: true
{{- end -}}

{{/* An item of the container's `volumeMounts`. Connecting needs no write access. */}}
{{- define "tessera.workerVolumeMount" -}}
- name: tessera
  mountPath: {{ include "tessera.directory" . }}
  readOnly: true
{{- end -}}

{{/* An item of the container's `env`: the address of the first instance, and of all instances on
     GPUs, where the client finds the daemon of its own GPU. */}}
{{- define "tessera.workerEnv" -}}
- name: TESSERA_ADDRESS
  value: {{ (include "tessera.instances" . | fromJsonArray | first).address }}
{{- end -}}

{{/* For the pod's `securityContext`: the group that may connect. */}}
{{- define "tessera.workerSecurityContext" -}}
supplementalGroups: [{{ int64 .Values.socketDirectory.gid }}]
{{- end -}}
