{{- define "kvtier.name" -}}
{{- printf "%s-kvtier" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "kvtier.selector" -}}
app.kubernetes.io/name: kvtier
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvtier.labels" -}}
{{ include "kvtier.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvtier.image" -}}
{{ required "image.repository is empty: build packaging/kubernetes/Dockerfile, push the image, and set image.repository to its name" .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Nothing of a container is writable or privileged. */ -}}
{{- define "kvtier.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "kvtier.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.user }}
runAsGroup: {{ .Values.group }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* Gives the directories of the node to the user; the argument names the root and the mounts. */ -}}
{{- define "kvtier.prepare" -}}
- name: prepare
  image: {{ include "kvtier.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [chown, "{{ .Values.user }}:{{ .Values.group }}", /node/disk, /node/sockets]
  securityContext:
    runAsNonRoot: false
    runAsUser: 0
    runAsGroup: 0
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL], add: [CHOWN]}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: disk, mountPath: /node/disk}
    - {name: sockets, mountPath: /node/sockets}
{{- end }}
