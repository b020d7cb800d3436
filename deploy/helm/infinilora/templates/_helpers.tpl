{{/* Each of these takes a dict: root, the whole context; component; conf, that component's values; base, or none. */}}

{{/* By what pods are found. It may never change: a workload's selector is fixed. */}}
{{- define "infinilora.selector" -}}
app.kubernetes.io/name: infinilora
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .base }}
infinilora/base: {{ . }}
{{- end }}
{{- end }}

{{- define "infinilora.labels" -}}
{{ include "infinilora.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* The name of a base's StatefulSet. Its pods are labelled with it and a hash: 63 letters at most. */}}
{{- define "infinilora.workload" -}}
{{- $name := printf "%s-%s-%s" .root.Release.Name .base .component }}
{{- if gt (len $name) 52 }}
{{- fail (printf "%s has %d letters; a StatefulSet may have 52: shorten the release's name or the base's" $name (len $name)) }}
{{- end }}
{{- $name }}
{{- end }}

{{/* The number of pods of one group. */}}
{{- define "infinilora.shards" -}}
{{- $cut := splitList "x" .conf.shape }}
{{- mul (index $cut 0) (index $cut 1) }}
{{- end }}

{{/* What the environments of all services share; each adds its own. */}}
{{- define "infinilora.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: INFINILORA_NATS_URL
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secrets.services }}, key: nats-url}}
- name: INFINILORA_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secrets.services }}, key: redis-url}}
- name: INFINILORA_RPC_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secrets.services }}, key: rpc-token}}
- name: INFINILORA_STORE_URL
  value: {{ .root.Values.store.url | quote }}
- name: INFINILORA_S3_CREDENTIALS
  value: {{ .root.Values.store.credentials }}
{{- if eq .root.Values.store.credentials "keys" }}
{{- $secret := index .root.Values.store.secrets (camelcase .component | untitle) }}
- name: INFINILORA_S3_ACCESS_KEY
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: access-key}}
- name: INFINILORA_S3_SECRET_KEY
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: secret-key}}
{{- end }}
- name: INFINILORA_VAR_DIR
  value: /var/lib/infinilora
{{- with .root.Values.otlpEndpoint }}
- name: INFINILORA_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- with .conf.drainSeconds }}
- name: INFINILORA_DRAIN_S
  value: {{ . | quote }}
{{- end }}
{{- range $name, $value := mergeOverwrite (deepCopy .root.Values.settings) .conf.settings }}
- name: INFINILORA_{{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{/* What the specs of all pods share: who they are, what they may, and where they run. */}}
{{- define "infinilora.pod" -}}
serviceAccountName: {{ .root.Release.Name }}-{{ .component }}
# Else a Service named infinilora-... would be variables INFINILORA_..., which are settings.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .conf.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .conf.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .conf.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .conf.spreadOver }}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "infinilora.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* What all containers share. */}}
{{- define "infinilora.container" -}}
image: {{ printf "%s:%s" .root.Values.image.repository (default .root.Chart.AppVersion .root.Values.image.tag) | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}
